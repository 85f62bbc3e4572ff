"""The command line: `raytrain VERB ...`, the same as `python -m jobs VERB ...`. Verbs are imported after parsing."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import click

try:
    from raytrain.errors import InputError, RaytrainError
except Exception as error:  # that of the file in which it is defined: the user has a package `jobs`
    if not hasattr(error, "exit_code"):
        raise
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)

from jobs.completion import complete_job, complete_key, complete_recipe
from jobs.driver import broken_output as output
from jobs.driver.signals import Interrupted
from jobs.job.arguments import split_arguments
from jobs.submission.request import VERBS
from jobs.submission.stop_request import watch_stop_request
from jobs.torchrun import torchrun_options

INTERRUPTED = 130


class _Verbs(click.Group):
    """Prints raytrain's own errors as one message on stderr, and exits with their code."""

    def main(self, *args: Any, **extra: Any) -> Any:
        signal.signal(signal.SIGTERM, _leave)  # until a verb installs its own handlers
        output.guard_output()
        own = not args and not extra  # the command itself, not a program that calls it
        try:
            try:
                returned = self._ended(*args, **extra)
            finally:
                output.flush_output()
        except output.OutputLost as lost:
            output.end_without_output(lost)
        except SystemExit as end:
            output.end_process(end.code, own=own)
            raise
        output.end_process(0, own=own)
        return returned

    def _ended(self, *args: Any, **extra: Any) -> Any:
        try:
            if "TORCHELASTIC_RUN_ID" in os.environ:
                from jobs.torchrun import launched

                sys.exit(launched([*args[0]] if args else sys.argv[1:], self.commands["train"]))
            watch_stop_request()
            return super().main(*args, **{**extra, "standalone_mode": False})
        except output.OutputLost:
            raise
        except click.exceptions.Exit as error:
            sys.exit(error.exit_code)
        except click.exceptions.NoArgsIsHelpError as error:
            click.echo(error.format_message())
            sys.exit(2)
        except click.ClickException as error:
            text, context = error.format_message().rstrip("."), getattr(error, "ctx", None)
            text = text if context is None else f"{text}; `{context.command_path} --help` shows what it takes"
            click.echo(f"error: {text}", err=True)
            sys.exit(2)
        except RaytrainError as error:
            click.echo(f"error: {error}", err=True)
            sys.exit(error.exit_code)
        except (click.Abort, KeyboardInterrupt, SystemExit) as end:  # `Interrupted` is a KeyboardInterrupt
            if isinstance(end, SystemExit) and end.code != signal.SIGTERM:  # SIGTERM: of Ray, while it starts
                raise
            click.echo("interrupted", err=True)
            sys.exit(INTERRUPTED)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        name = args[0] if args else ""
        if name and not name.startswith("-") and self.get_command(ctx, name) is None:
            from raytrain.config.messages import suggestion
            from raytrain.runs.folder import shell_command

            verbs = self.list_commands(ctx)
            job = f"did you mean `{shell_command('train', name)}`?" if "." in name or "/" in name or "=" in name else ""
            raise InputError(
                "raytrain", got=f"the unknown verb {name}", expected=f"one of {', '.join(verbs)}",
                remedy=job or suggestion(name, verbs),
            )  # fmt: skip
        return super().resolve_command(ctx, args)


def _leave(number: int, frame: object) -> None:
    """Exit at once: nothing has started yet, so nothing has to be saved."""
    raise Interrupted(signal.Signals(number).name)


def _keys_option(verb: str) -> Any:
    """A command class whose `--help` ends with the important keys of a verb. It takes the options of other launchers as
    keys, and says of any other option which key it probably means."""

    class VerbCommand(click.Command):
        def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
            from jobs.job.keys import INFERENCE, LAUNCHER, TRAINING, as_keys, unknown_option

            names = LAUNCHER | (INFERENCE if verb == "infer" else TRAINING)
            given = as_keys(args, names)
            try:
                return super().parse_args(ctx, list(given))
            except click.NoSuchOption as error:
                known = [name for option in self.params for name in option.opts if name.startswith("--")]
                raise unknown_option(error.option_name, given, verb=self.name or verb, known=known) from error

        def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
            from jobs.job.keys import important_entries

            with formatter.section("Important keys, as section.key=value"):
                formatter.write_dl(important_entries(verb), col_max=30)
            formatter.write_text("")
            formatter.write_text("`raytrain keys` lists all keys, `raytrain keys loop` those of a section.")

    return VerbCommand


JOB = "[JOB.yaml | RECIPE] [section.key=value ...]"


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(package_name="raytrain", prog_name="raytrain")
def main() -> None:
    """Train any PyTorch model on a Ray cluster, or on this machine."""


@main.command(cls=_keys_option("train"), short_help="Train a model from a job file or a recipe.")
@click.argument("arguments", nargs=-1, metavar=JOB, shell_complete=complete_job)
@click.option(
    "--resume",
    metavar="RUN_DIR",
    help="resume the run in this folder; `auto`: the newest unfinished run of the same job, else start one",
)
@click.option("--from-tune", "sweep", metavar="DIR", help="train with the best.yaml of this search folder")
@click.option("--debug", is_flag=True, help="train here, without Ray except for Ray Datasets; breakpoint() works")
@click.option("-v", "--verbose", is_flag=True, help="show Ray's own messages")
def train(arguments: tuple[str, ...], resume: str | None, sweep: str | None, debug: bool, verbose: bool) -> None:
    """Train a model from JOB.yaml or a recipe (default: the recipe `default`)."""
    from rich.console import Console

    from jobs.train import run_train

    path, overrides = split_arguments(arguments)
    if sweep is not None:
        from jobs.tune import found_job

        path = found_job(sweep, beside=path or resume)
    output.outlive_output()
    console = Console(highlight=False)
    result = run_train(path, overrides, resume=resume, verbose=verbose, debug=debug, console=console)
    output.end_at_once({"done": 0, "failed": 1, "interrupted": INTERRUPTED}[result.status])


@main.command(cls=_keys_option("tune"), short_help="Search for the fastest batch size and precision, or other keys.")
@click.argument("arguments", nargs=-1, metavar=JOB, shell_complete=complete_job)
@click.option("--resume", metavar="DIR", help="resume the search in this folder; trials whose process died run again")
@click.option("-v", "--verbose", is_flag=True, help="show Ray's own messages")
def tune(arguments: tuple[str, ...], resume: str | None, verbose: bool) -> None:
    """Search for the fastest batch size and precision, or over the keys of tune.space."""
    from rich.console import Console

    from jobs.tune import run_tune

    path, overrides = split_arguments(arguments)
    console = Console(highlight=False)
    output.outlive_output()
    result = run_tune(path, overrides, resume=resume, verbose=verbose, console=console)
    output.end_at_once({"done": 0, "interrupted": INTERRUPTED}[result.status])


@main.command(cls=_keys_option("train"), short_help="Show what a run would do and why; starts nothing.")
@click.argument("arguments", nargs=-1, metavar=JOB, shell_complete=complete_job)
@click.option("--json", "as_json", is_flag=True, help="print the plan as JSON")
@click.option(
    "--print", "as_text", type=click.Choice(["yaml", "torchrun"]),
    help="yaml: a job file with what was decided; torchrun: the command for each node of --nnodes",
)  # fmt: skip
@torchrun_options
@click.option("--build", is_flag=True, help="open the data and build the model for exact sizes (imports torch)")
@click.option("--full", is_flag=True, help="also list the keys that have their default")
@click.option("--inventory", "inventory_file", metavar="NODES.yaml", help="plan for these machines instead of this one")
def plan(arguments: tuple[str, ...], **options: Any) -> None:
    """Show what a run would do and why, without starting anything.

    \b
    NODES.yaml lists machines; gpus and capability are optional:
    - host: a
      cpus: 32
      memory_gib: 128
      gpus: [{name: A100, memory_gib: 80, capability: 8.0, count: 4}]
    - {host: b, cpus: 16, memory_gib: 64}
    """
    from jobs.plan import plan_verb

    path, overrides = split_arguments(arguments)
    sys.exit(plan_verb(path, overrides, **options))


@main.command(short_help="Write the report of runs, compare them, or watch one.")
@click.argument("runs", nargs=-1, metavar="[RUN_DIR | OUTPUT_DIR | FILE.json ...]")
@click.option("-f", "--follow", is_flag=True, help="watch one run in the terminal until it ends, with its exit code")
def report(runs: tuple[str, ...], follow: bool) -> None:
    """Write the report of each run folder (default: runs/latest), and print what stands out.

    Several runs are also compared. The report of an output folder of `infer` is written as well, and the FILE.json of a
    benchmark as Markdown tables.
    """
    from jobs.report import follow_run, report_verb

    sys.exit(follow_run(list(runs)) if follow else report_verb(list(runs)))


@main.command(short_help="Write the weights of a checkpoint of a run.")
@click.argument("run", metavar="RUN")
@click.option("--step", metavar="N|best|last", help="which checkpoint; by default as the run itself exports")
@click.option("--to", "target", metavar="DIR", help="a new or empty folder or URI (default: RUN/exports/step_N)")
def export(run: str, step: str | None, target: str | None) -> None:
    """Write the weights of a checkpoint of RUN, which may be finished, interrupted, failed or still running.

    The folder has the format of a finished run's weights/: model.safetensors, and the other files of a transformers
    model. Does not start Ray.
    """
    from jobs.export import export_verb

    sys.exit(export_verb(run, step=step, target=target))


@main.command(cls=_keys_option("infer"), short_help="Answer the rows of infer.input with a trained model.")
@click.argument(
    "arguments", nargs=-1, metavar="[RUN | JOB.yaml | FOLDER | module:function] [section.key=value ...]",
    shell_complete=complete_job,
)  # fmt: skip
@click.option("--resume", metavar="DIR", help="continue the interrupted command that wrote this output folder")
@click.option("--dry-run", is_flag=True, help="print the plan and start nothing")
@click.option("-v", "--verbose", is_flag=True, help="show Ray's own messages")
def infer(arguments: tuple[str, ...], resume: str | None, dry_run: bool, verbose: bool) -> None:
    """Answer the rows of infer.input with a trained model (default: the newest run), in input order.

    RUN is a run folder, FOLDER one that transformers wrote, and module:function a builder.
    """
    from rich.console import Console

    from jobs.infer import run_infer

    path, overrides = split_arguments(arguments)
    console = Console(highlight=False)
    given = None if path is None else str(path)
    if not dry_run:
        output.outlive_output()
    result = run_infer(given, overrides, resume=resume, dry_run=dry_run, verbose=verbose, console=console)
    sys.exit(0 if result is None or result.status == "done" else 1)


@main.command()
@click.argument("name", required=False, shell_complete=complete_recipe)
def recipes(name: str | None) -> None:
    """List the packaged recipes, or print the recipe NAME.

    The name of a recipe can be used instead of a JOB.yaml.
    """
    from jobs.job.spec import read_recipe, recipe_lines

    click.echo("\n".join(recipe_lines()) if name is None else read_recipe(name).rstrip())


@main.command()
@click.argument("name", required=False, metavar="[SECTION | KEY]", shell_complete=complete_key)
def keys(name: str | None) -> None:
    """List the keys of a job with meaning, values and default."""
    import shutil

    from jobs.job.keys import key_lines

    click.echo("\n".join(key_lines(name, width=min(120, shutil.get_terminal_size((80, 24)).columns))))


@main.command(short_help="Print the JSON schema of a job, for editors.")
@click.option("--out", metavar="FILE.json", help="write it to this file")
def schema(out: str | None) -> None:
    """Print the JSON schema of a job, with which editors complete and check keys."""
    import json

    from jobs.job.keys import job_schema
    from raytrain.runs.storage import typed_path

    text = json.dumps(job_schema(), indent=2, default=repr)
    if out is None:
        click.echo(text)
        return
    try:
        with open(typed_path(out, key="--out"), "w", encoding="utf-8") as file:
            file.write(f"{text}\n")
    except OSError as error:
        raise InputError("--out", got=str(error), expected="a file that can be written") from error


class _BenchCommand(click.Command):
    """`bench --help` ends with the names of the benches, `bench NAME --help` with the keys of that one."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        named = [item for before, item in zip(["", *args], args, strict=False) if before != "--out"]
        ctx.meta["bench"] = next((item for item in named if not item.startswith("-")), None)
        return super().parse_args(ctx, args)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from jobs.bench.harness.options import bench_names, bench_section

        name = ctx.meta["bench"]
        title, rows = ("Benchmarks", bench_names()) if name is None else bench_section(name)
        with formatter.section(title):
            formatter.write_dl(rows, col_max=38)
        if name is None:
            formatter.write_text("")
            formatter.write_text("`raytrain bench NAME --help` lists the keys of a benchmark.")


@main.command(cls=_BenchCommand)
@click.argument("name", required=False)
@click.argument("arguments", nargs=-1, metavar="[key=value ...]")
@click.option("--list", "as_list", is_flag=True, help="list the benchmarks and what they measure")
@click.option("--out", metavar="FILE.json", help="file for the raw values (default: runs/bench/NAME-TIME.json)")
@click.option("--quick", is_flag=True, help="test run with tiny sizes; its timings are meaningless")
@click.option("--json", "as_json", is_flag=True, help="print the raw values as JSON; other output goes to stderr")
def bench(name: str | None, arguments: tuple[str, ...], as_list: bool, **options: Any) -> None:
    """Run the benchmark NAME on this machine.

    The variants run in alternating blocks of one run; results are ratios with confidence intervals.
    """
    from jobs.bench.harness.options import bench_verb, list_lines

    if as_list:
        click.echo("\n".join(list_lines()))
        return
    if name is None:
        raise InputError("bench", got="no name", expected="a name listed by `raytrain bench --list`")
    output.outlive_output()
    sys.exit(bench_verb(name, arguments, **options))


@main.command(cls=_keys_option("check"), short_help="Check the machines, then train two steps in each precision.")
@click.argument("arguments", nargs=-1, metavar=JOB, shell_complete=complete_job)
@click.option("--quick", is_flag=True, help="the machines only, without the training")
@click.option("--json", "as_json", is_flag=True, help="print everything that was found as JSON")
@click.option("--short", is_flag=True, help="print one line")
@click.option("--bundle", metavar="FILE.zip", help="write what was found to an archive for support, without secrets")
@click.option("--run", metavar="RUN", help="add the records and last log lines of this run to the bundle")
def check(arguments: tuple[str, ...], **options: Any) -> None:
    """Check the machines of a job, then train two steps in each precision.

    Exit code 0: every check is ok or a warning; 1: one failed.
    """
    from jobs.check import run_check

    path, overrides = split_arguments(arguments)
    sys.exit(run_check(path, overrides, **options))


@main.command(short_help="Watch the devices and Ray's worker processes.")
@click.option("--address", metavar="ADDRESS", help="of a Ray cluster, or `auto` (default: RAY_ADDRESS)")
@click.option("--every", default=1.0, show_default=True, metavar="SECONDS", help="time between frames")
@click.option("--frames", type=int, metavar="N", help="end after N frames (default: until Ctrl-C)")
@click.option("--json", "as_json", is_flag=True, help="print each frame as a line of JSON")
def top(address: str | None, every: float, frames: int | None, as_json: bool) -> None:
    """Watch the devices and Ray's workers of a cluster, or, without an address, of this machine.

    For a machine without a cluster nothing is started: the workers of any run on it are shown.
    """
    from rich.console import Console

    from jobs.top import run_top

    address = address or os.environ.get("RAY_ADDRESS") or None
    sys.exit(run_top(address=address, every=every, frames=frames, as_json=as_json, console=Console(highlight=False)))


class _SubmitVerbs(click.Group):
    """The verbs that can be submitted, and `status`, `logs`, `stop` and `fetch`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*VERBS, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return _submitted(cmd_name) if cmd_name in VERBS else super().get_command(ctx, cmd_name)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if self.get_command(ctx, args[0]) is None:
            from raytrain.config.messages import suggestion

            offered, elsewhere = self.list_commands(ctx), main.get_command(ctx, args[0]) is not None
            remedy = f"{args[0]} needs no cluster: run it here" if elsewhere else suggestion(args[0], offered)
            raise InputError("submit", got=args[0], expected=f"one of {', '.join(offered)}", remedy=remedy)
        return super().resolve_command(ctx, args)


_address = click.option(
    "--address", metavar="URL", help="the cluster's dashboard (default: RAY_API_SERVER_ADDRESS, http://127.0.0.1:8265)"
)


def _submitted(verb: str) -> click.Command:
    """`submit VERB`: its own options, and everything else for the verb."""
    command = main.commands[verb]

    @click.command(
        name=verb, help=f"{command.get_short_help_str(100)} As a job on the cluster, from the working directory.",
        short_help=command.get_short_help_str(100), context_settings={"ignore_unknown_options": True},
    )  # fmt: skip
    @click.argument(
        "arguments", nargs=-1, type=click.UNPROCESSED, metavar=f"[ARGUMENTS OF {verb} ...]", shell_complete=complete_job
    )
    @_address
    @click.option("--id", "job_id", metavar="ID", help="ID of the job (default: NAME-TIME)")
    @click.option("--install", is_flag=True, help="install the versions of the packages used here for this job")
    @click.option("--detach", is_flag=True, help="return once the job is submitted")
    def submitted(arguments: tuple[str, ...], **options: Any) -> None:
        from jobs.submit import submit_verb

        sys.exit(submit_verb(verb, command, arguments, **options))

    return submitted


@main.group(cls=_SubmitVerbs, short_help="Run a verb as a Ray job on a cluster; look after such jobs.")
def submit() -> None:
    """Run a verb as a Ray job on a cluster, and look after such jobs.

    The exit code is the job's: 0 done, 1 failed, 2 wrong input, 130 stopped, 137 killed. After Ctrl-C the job
    keeps running; a line says how to follow it again, and how to stop it.
    """


@submit.command()
@click.argument("job_id", metavar="ID", required=False)
@_address
@click.option("--json", "as_json", is_flag=True, help="print JSON")
def status(job_id: str | None, address: str | None, as_json: bool) -> None:
    """Show the job ID, or all jobs."""
    from jobs.submit import status_verb

    sys.exit(status_verb(job_id, address=address, as_json=as_json))


@submit.command()
@click.argument("job_id", metavar="ID")
@_address
@click.option("--follow", "following", is_flag=True, help="to its end, with the job's exit code")
def logs(job_id: str, address: str | None, following: bool) -> None:
    """Print what the job has printed."""
    from jobs.submit import logs_verb

    sys.exit(logs_verb(job_id, address=address, following=following))


@submit.command(short_help="Ask the job to save and stop; Ray stops it if it does not.")
@click.argument("job_id", metavar="ID")
@_address
def stop(job_id: str, address: str | None) -> None:
    """Ask the job to save and stop, wait retry.stop_grace_s, then let Ray stop it."""
    from jobs.submit import stop_verb

    sys.exit(stop_verb(job_id, address=address))


@submit.command(short_help="Copy the job's run folder here, and verify the copy.")
@click.argument("job_id", metavar="ID")
@_address
@click.option("--to", "target", metavar="DIR", help="where to put the run folder (default: runs)")
def fetch(job_id: str, address: str | None, target: str | None) -> None:
    """Copy the job's run folder from a disk of the cluster, and verify the copy."""
    from jobs.submit import fetch_verb

    sys.exit(fetch_verb(job_id, address=address, target=target))


if __name__ == "__main__":
    main()
