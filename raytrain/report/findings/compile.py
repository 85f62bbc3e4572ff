"""Findings about compilation: whether it pays in this run, graph breaks, and code that is compiled again and again."""

from __future__ import annotations

from raytrain.config.messages import abbreviated, advice
from raytrain.report.compilation import CompileGain, compile_gain
from raytrain.report.figures import seconds, time_account
from raytrain.report.findings.finding import Finding
from raytrain.report.records import RunRecords, number

#: The last batch of an epoch, an evaluation and their last batch have shapes of their own: up to so many are usual.
USUAL_RECOMPILES = 4
OTHER_MODES = "`raytrain bench claims parts=[compile]` measures all modes, and from which step on each pays."


def compilation_pays(records: RunRecords) -> list[Finding]:
    """Whether compiled steps are faster, and by which step they make up for the compilation. Nothing for a run that has
    not measured an eager step."""
    gain = compile_gain(records)
    if gain is None:
        return []
    wall = sum(spent for _, spent in time_account(records))
    both = f"compiled {seconds(gain.compiled_s)}, eager {seconds(gain.eager_s)} a step: {gain.ratio:.2f} times"
    took = f"compilation took {seconds(gain.compiler_s)} of {seconds(wall)}"
    evidence = f"{both}; {took}"
    if gain.verdict == "slower":
        return [Finding("warning", "Compiled is slower", evidence, "Set loop.compile: off.")]
    if gain.break_even is None:
        return [Finding("warning", "Compilation gains nothing", evidence, f"Set loop.compile: off. {OTHER_MODES}")]
    return [_paid(gain, evidence)]


def _paid(gain: CompileGain, evidence: str) -> Finding:
    step = f"step {gain.break_even:,}"
    if gain.break_even is not None and gain.break_even > gain.steps:
        remedy = f"Set loop.compile: off for runs shorter than {gain.break_even:,} steps."
        seen = f"{evidence}; it pays after {step}, this run has {gain.steps:,}"
        return Finding("warning", "Compilation did not pay", seen, remedy)
    return Finding("good", "Compilation pays", f"{evidence}; it pays after {step} of {gain.steps:,}")


def graph_breaks(records: RunRecords) -> list[Finding]:
    """Graph breaks: how often compiled code returns to Python, and why."""
    rows = records.of_kind("compile")
    last = rows[-1] if rows else {}
    breaks = int(number(last.get("graph_breaks")) or 0)
    if not breaks:
        return []
    why = "; ".join(map(str, last.get("breaks_at") or [])) or "torch does not say why"
    seen = f"{breaks} times in {last.get('achieved', 'its parts')}: {why}"
    return [Finding("info", "Compiled code has graph breaks", seen, OTHER_MODES)]


def recompiles(records: RunRecords) -> list[Finding]:
    """Code that is compiled again for each new shape of its input."""
    rows = records.of_kind("compile")
    last = rows[-1] if rows else {}
    times = int(number(last.get("recompiles")) or 0)
    if times <= USUAL_RECOMPILES:
        return []
    parts = [str(part.get("name")) for part in last.get("parts") or [] if number(part.get("recompiles"))]
    seen = f"{times} times, {seconds(number(last.get('seconds')))} of compilation in all"
    seen += f": {abbreviated(parts, 4)}" if parts else ""
    remedy = advice(
        ("give all batches one shape (model.context, data.collate)", False),
        ("compile only parts with fixed shapes (loop.compile_parts)", False),
        ("set loop.compile: off", False),
    )
    return [Finding("warning", "Compiled code was compiled again and again", seen, remedy)]
