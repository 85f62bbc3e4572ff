"""Modules as users bring them, against a plain PyTorch loop: strides, dtypes, modes, parameters that take no part."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raytrain.errors import RunError
from raytrain.models.blocks import repeated
from raytrain.train.session import Session
from raytrain.trainable import LossOutput, Trainable
from tests.numerics.lab import Rows, make_session, train

LR = 0.05
ADAMW = {"lr": LR, "schedule": "constant", "warmup_steps": 0, "weight_decay": 0.1, "max_grad_norm": None}
SGD = {**ADAMW, "name": "sgd", "momentum": 0.9}


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rows(count: int = 8, width: int = 4) -> dict[str, Tensor]:
    x = drawn(count, width)
    return {"x": x, "labels": x[:, :1] * 2 - x[:, 1:2]}


def built(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def session_for(
    module: Any, data: dict[str, Tensor], *, micro: int | None = None, steps: int = 6, **sections: Any
) -> Session:
    count = len(next(iter(data.values())))
    loop = {"max_steps": steps, "global_batch_size": count, **({"micro_batch_size": micro} if micro else {})}
    optim = sections.pop("optim", ADAMW)
    loop |= sections.pop("loop", {})
    given = {"train": data, "eval_fraction": 0, **sections.pop("held_out", {})}
    return make_session({"module": copy.deepcopy(module)}, given, optim=optim, loop=loop, **sections)


def trained(module: Any, data: dict[str, Tensor], **more: Any) -> tuple[list[float], dict[str, Tensor], Rows]:
    session = session_for(module, data, **more)
    found, _ = train(session)
    return found.losses, session.trainable.module.state_dict(), found


def plain(
    module: nn.Module, data: dict[str, Tensor], *, steps: int = 6, optim: dict[str, Any] = ADAMW, mode: bool = True
) -> tuple[list[float], dict[str, Tensor]]:
    """A loop over the whole batch."""
    module = copy.deepcopy(module)
    if mode:
        module.train()
    groups = [
        {"params": [p for p in module.parameters() if p.dim() > 1], "weight_decay": optim["weight_decay"]},
        {"params": [p for p in module.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    optimizer: torch.optim.Optimizer = (
        torch.optim.SGD(groups, lr=LR, momentum=0.9)
        if optim.get("name") == "sgd"
        else torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.99), eps=1e-8)
    )
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        out = module(**data)
        loss = out["loss"] if isinstance(out, dict) else out
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, module.state_dict()


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    wide = [(tensor if tensor.is_complex() else tensor.double() for tensor in (one[name], other[name])) for name in one]
    return max(float((a - b).abs().max()) for a, b in wide)


def assert_as_plain(module: nn.Module, data: dict[str, Tensor], *, near: float = 2e-5, **more: Any) -> None:
    options = {name: more[name] for name in ("steps", "optim") if name in more}
    expected, weights = plain(module, {name: value.clone() for name, value in data.items()}, **options)
    losses, state, _ = trained(module, data, **more)
    assert losses == pytest.approx(expected, rel=near, abs=near)
    assert apart(state, weights) <= 20 * near


# ---------------------------------------------------------------- strides


class Images(nn.Module):
    def __init__(self, convolution: Any, layout: torch.memory_format, grouped: int = 1) -> None:
        super().__init__()
        self.a, self.b, self.o = convolution(3, 8, 3), convolution(8, 4, 2, groups=grouped), nn.Linear(4, 1)
        self.to(memory_format=layout)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        y = torch.relu(self.b(torch.relu(self.a(x))))
        return {"loss": F.mse_loss(self.o(y.flatten(2).mean(2)), labels)}


class Sliced(nn.Module):
    """Weights that are no row-major block of memory: transposed, permuted, a slice with gaps."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, 4).t())
        self.p = nn.Parameter(torch.randn(3, 6, 2).permute(1, 2, 0))
        self.s = nn.Parameter(torch.randn(6, 5)[:, 1::2])
        self.scale = nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        y = torch.tanh(x @ self.w)
        return {
            "loss": F.mse_loss((y @ self.p[:, 0] + y @ self.s.repeat(1, 2)[:, :3]).sum(1, True) * self.scale, labels)
        }


@pytest.mark.parametrize("optim", [ADAMW, SGD, {**ADAMW, "fused": False}], ids=["adamw", "sgd", "unfused"])
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: Images(nn.Conv2d, torch.channels_last), (8, 3, 8, 8)),
        (lambda: Images(nn.Conv2d, torch.channels_last, grouped=4), (8, 3, 6, 7)),
        (lambda: Images(nn.Conv3d, torch.channels_last_3d), (8, 3, 5, 4, 6)),
        (Sliced, (8, 4)),
    ],
    ids=["channels_last", "grouped", "channels_last_3d", "sliced"],
)
def test_weights_of_any_strides_train_as_in_a_plain_loop(
    make: Callable[[], nn.Module], shape: tuple[int, ...], optim: dict[str, Any]
) -> None:
    data = {"x": drawn(*shape), "labels": drawn(8, 1, seed=2)}
    assert_as_plain(built(make), data, optim=optim)
    assert_as_plain(built(make), data, optim=optim, micro=2)


def test_clipping_sees_every_element_of_a_channels_last_gradient() -> None:
    data = {"x": drawn(8, 3, 8, 8), "labels": 9 * drawn(8, 1, seed=2)}
    module = built(lambda: Images(nn.Conv2d, torch.channels_last))
    session = session_for(module, data, steps=1, optim={**ADAMW, "max_grad_norm": 0.1})
    found, _ = train(session)
    reference = copy.deepcopy(module)
    reference(**data)["loss"].backward()
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    assert found.of("train", "grad_norm") == pytest.approx([float(norm)], rel=1e-5)
    for own, other in zip(session.trainable.module.parameters(), reference.parameters(), strict=True):
        assert other.grad is not None and own.grad is not None and own.grad.stride() == other.stride()
        assert torch.allclose(own.grad, other.grad, atol=1e-6)


@pytest.mark.parametrize("optim", [ADAMW, SGD], ids=["adamw", "sgd"])
def test_a_resumed_run_gives_the_optimizer_its_state_in_the_order_of_the_weights(optim: dict[str, Any]) -> None:
    """A checkpoint holds tensors row by row; fused kernels walk through weights and state alike."""
    data = {"x": drawn(8, 3, 8, 8), "labels": drawn(8, 1, seed=2)}
    module = built(lambda: Images(nn.Conv2d, torch.channels_last))
    whole = trained(module, data, steps=6, optim=optim)
    half = session_for(module, data, steps=3, optim=optim)
    train(half)
    other = session_for(module, data, steps=6, optim=optim)
    other.strategy.load({name: value.contiguous() for name, value in half.trainable.module.state_dict().items()})
    for own, from_ in zip(other.optimizers, half.optimizers, strict=True):
        state = copy.deepcopy(from_.state_dict())
        for held in state["state"].values():
            held.update({name: value.contiguous() for name, value in held.items()})
        other.strategy.load_optimizer(own, state)
    other.state = half.state
    found, _ = train(other)
    assert found.losses == whole[0][3:]
    assert apart(other.trainable.module.state_dict(), whole[1]) == 0


def test_a_resumed_run_rounds_its_means_as_before() -> None:
    """The unit in which a loss tells its weight is that of the first micro-batch of the run, not of the attempt."""
    data = {"x": drawn(8, 4), "labels": LABELS.clamp(min=1)}
    module = built(lambda: Classes(MEANS["class weights"]))
    whole = trained(module, data, steps=7, micro=2)[0]
    half = session_for(module, data, steps=4, micro=2)
    train(half)
    other = session_for(module, data, steps=7, micro=2)
    other.strategy.load(half.trainable.module.state_dict())
    for own, from_ in zip(other.optimizers, half.optimizers, strict=True):
        other.strategy.load_optimizer(own, from_.state_dict())
    other.state = type(half.state).from_json(half.state.to_json())
    assert half.state.weight_unit not in (None, 1.0)
    assert train(other)[0].losses == whole[4:]


# ---------------------------------------------------------------- dtypes


class Rotary(nn.Module):
    def __init__(self, *, persistent: bool = False) -> None:
        super().__init__()
        self.a, self.o = nn.Linear(4, 8), nn.Linear(8, 1)
        angles = torch.tensor([0.3, 1.1, 2.0, 2.9])
        self.register_buffer("table", torch.polar(torch.ones(4), angles), persistent=persistent)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        turned = torch.view_as_complex(self.a(x).view(-1, 4, 2)) * self.table
        return {"loss": F.mse_loss(self.o(torch.view_as_real(turned).flatten(1)), labels)}


class Seconds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.o = nn.Linear(4, 1)
        self.register_buffer("origin", torch.tensor([1.7e9 + 3.25], dtype=torch.float64))
        self.register_buffer("codes", torch.tensor([3, 60000], dtype=torch.uint16))
        self.register_buffer("packed", torch.tensor([0.5, 1.5]).to(torch.float8_e4m3fn))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        shift = ((self.origin - 1.7e9) * 0.3).to(x.dtype) + self.packed.to(x.dtype).sum()
        return {"loss": F.mse_loss(self.o(x) + shift, labels)}


class Fourier(nn.Module):
    """Complex weights beside real ones; of odd sizes, since complex numbers lie at even places of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.w = nn.Linear(4, 4), nn.Parameter(torch.randn(3, 3, dtype=torch.cfloat) * 0.3)
        self.b, self.o = nn.Parameter(torch.zeros(3, dtype=torch.cfloat)), nn.Linear(4, 1)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        turned = torch.fft.rfft(self.first(x), dim=1) @ self.w.t() + self.b
        return {"loss": F.mse_loss(self.o(torch.fft.irfft(turned, n=4, dim=1)), labels)}


@pytest.mark.parametrize("optim", [ADAMW, SGD], ids=["adamw", "sgd"])
@pytest.mark.parametrize("make", [Rotary, Seconds, Fourier])
def test_complex_and_wide_state_is_kept_and_trains(make: Callable[[], nn.Module], optim: dict[str, Any]) -> None:
    assert_as_plain(built(make), rows(), optim=optim)
    assert_as_plain(built(make), rows(), optim=optim, micro=2)


def test_the_norm_of_complex_gradients_counts_both_parts() -> None:
    module = built(Fourier)
    found = trained(module, rows(), steps=1)[2]
    module(**rows())["loss"].backward()
    squares = sum(float(p.grad.abs().square().sum()) for p in module.parameters() if p.grad is not None)
    assert found.of("train", "grad_norm") == pytest.approx([squares**0.5], rel=1e-5)


def test_a_model_in_another_format_takes_the_master_format_with_the_buffers_that_follow_it() -> None:
    module = built(lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), Rotary(persistent=True))).double()
    module.register_buffer("narrow", torch.ones(2, dtype=torch.bfloat16))
    session = make_session(
        {"module": Trainable.from_module(module, loss=lambda m, batch: m[0](batch["x"]).mean())},
        {"train": rows(), "eval_fraction": 0}, loop={"global_batch_size": 8},
    )  # fmt: skip
    kinds = {name: tensor.dtype for name, tensor in session.trainable.module.state_dict().items()}
    assert kinds["0.weight"] is kinds["1.running_var"] is torch.float32
    assert (kinds["narrow"], kinds["1.num_batches_tracked"]) == (torch.bfloat16, torch.int64)
    wide = make_session({"module": built(Rotary)}, {"train": rows(), "eval_fraction": 0}, precision="fp64",
                        loop={"global_batch_size": 8})  # fmt: skip
    assert wide.trainable.module.table.dtype is torch.complex128


# ---------------------------------------------------------------- modes


class Backbone(nn.Module):
    def __init__(self, *, frozen: bool) -> None:
        super().__init__()
        self.back = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)).requires_grad_(not frozen).eval()
        self.norm, self.o = nn.BatchNorm1d(6), nn.Linear(6, 1)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": F.mse_loss(self.o(self.norm(self.back(x))), labels)}


@pytest.mark.parametrize("frozen", [True, False])
def test_a_part_in_eval_mode_stays_in_it_after_evaluations_and_says_so(frozen: bool) -> None:
    module = built(lambda: Backbone(frozen=frozen))
    more = {"held_out": {"eval": rows(5)}, "loop": {"eval_every": 2}, "optim": SGD}
    said: list[dict[str, Any]] = []
    session = session_for(module, rows(), **more)
    session.say = lambda kind, **fields: said.append({"kind": kind, **fields})
    session.prepare("fp32")
    found, _ = train(session)
    expected, weights = plain(module, rows(), mode=False, optim=SGD)  # AdamW magnifies the noise of zero gradients
    assert found.losses == pytest.approx(expected, abs=1e-5)
    assert torch.equal(session.trainable.module.back[1].running_mean, module.back[1].running_mean)
    assert not torch.equal(weights["norm.running_mean"], module.norm.running_mean)
    assert torch.allclose(session.trainable.module.norm.running_mean, weights["norm.running_mean"], atol=1e-5)
    assert [one["value"] for one in said if one.get("what") == "eval_mode"] == [["back"]]


class KeepsEval(Backbone):
    def train(self, mode: bool = True) -> KeepsEval:
        super().train(mode)
        self.back.eval()
        return self


def test_a_train_method_of_the_modules_own_decides() -> None:
    module = built(lambda: KeepsEval(frozen=False))
    module.back.train()  # as built; its own train() ends that
    losses, _, _ = trained(module, rows())
    assert losses == pytest.approx(plain(module, rows())[0], abs=1e-5)


def test_a_model_that_arrives_in_eval_mode_as_a_whole_trains_as_a_whole() -> None:
    module = built(lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))).eval()
    given = Trainable.from_module(module, loss=lambda m, batch: F.mse_loss(m(batch["x"]), batch["labels"]))
    session = session_for(given, rows())
    train(session)
    assert float(session.trainable.module[1].num_batches_tracked) == 6


def test_a_transformers_model_inside_another_module_trains_unless_it_is_frozen() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32}

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = transformers.BertConfig(**sizes, vocab_size=20)
            self.inner = transformers.BertModel(config).eval()  # as from_pretrained returns it
            self.other = transformers.BertModel(config).eval().requires_grad_(False)
            self.o = nn.Linear(16, 1)

        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
            hidden = self.inner(input_ids).pooler_output + self.other(input_ids).pooler_output
            return F.mse_loss(self.o(hidden), labels)

    data = {"input_ids": torch.arange(32).view(8, 4) % 20, "labels": drawn(8, 1)}
    session = session_for(built(Wrapped), data, steps=1)
    module = session.trainable.module
    assert all(part.training for part in module.inner.modules())
    assert not any(part.training for part in module.other.modules())


# ---------------------------------------------------------------- parameters that take no part


class Heads(nn.Module):
    """Two heads, of which the number of the step chooses one; a layer that nothing calls."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.never = nn.Linear(4, 1), nn.Linear(4, 1), nn.Linear(4, 3)
        self.register_buffer("n", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        head = self.a if int(self.n) % 3 else self.b
        self.n += 1
        return {"loss": F.mse_loss(head(x), labels)}


@pytest.mark.parametrize("optim", [ADAMW, SGD, {**ADAMW, "fused": False}], ids=["adamw", "sgd", "unfused"])
def test_a_layer_without_a_gradient_in_a_step_is_left_alone_in_it(optim: dict[str, Any]) -> None:
    module = built(Heads)
    losses, state, _ = trained(module, rows(), steps=8, optim=optim)
    expected, weights = plain(module, rows(), steps=8, optim=optim)
    assert losses == pytest.approx(expected, rel=1e-6)
    assert apart(state, weights) < 1e-6
    assert torch.equal(state["never.weight"], module.never.weight)


class Freezes(nn.Module):
    def __init__(self, *, frozen_from: int) -> None:
        super().__init__()
        self.back, self.o, self.when = nn.Linear(4, 4), nn.Linear(4, 1), frozen_from
        self.register_buffer("n", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.n += 1
        self.back.requires_grad_(bool((self.n < 3) if self.when > 0 else (self.n >= 3)))
        return {"loss": F.mse_loss(self.o(torch.tanh(self.back(x))), labels)}


def test_a_layer_frozen_or_unfrozen_in_mid_run_follows_a_plain_loop() -> None:
    for module in (built(lambda: Freezes(frozen_from=3)), built(lambda: Freezes(frozen_from=0))):
        assert_as_plain(module, rows(), steps=7, near=1e-6)


def test_unfreezing_what_was_frozen_at_the_start_is_refused_by_name_at_its_step() -> None:
    module = built(lambda: Freezes(frozen_from=0))
    module.back.requires_grad_(False)
    session = session_for(module, rows(), steps=7)
    with pytest.raises(RunError, match=r"back\.weight was frozen at the start \(requires_grad=False\)"):
        train(session)
    assert session.state.step == 2


# ---------------------------------------------------------------- means


class Classes(nn.Module):
    def __init__(self, loss: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.o, self.how = nn.Linear(4, 3), loss

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return self.how(self.o(x), labels)


LABELS = torch.tensor([0, 0, 1, 2, 1, 0, 2, 0])
WEIGHTS = torch.tensor([1.0, 10.0, 0.5])


def masked(logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
    each, mask = F.cross_entropy(logits, labels, reduction="none"), labels != 0
    return {"loss": (each * mask).sum() / mask.sum()}


def selected(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="none")[labels != 1].mean()


def written(logits: Tensor, labels: Tensor) -> Tensor:
    labels[labels == 0] = -100
    return F.cross_entropy(logits, labels)


def returned(logits: Tensor, labels: Tensor) -> dict[str, Any]:
    share = 1.0 + labels.float()
    each = F.cross_entropy(logits, labels, reduction="none")
    return {"loss": (each * share).sum() / (share.sum() + 1e-12).sqrt().square(), "weight": share.sum()}


MEANS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "class weights": lambda logits, labels: F.cross_entropy(logits, labels, weight=WEIGHTS),
    "ignore_index": lambda logits, labels: {"loss": F.cross_entropy(logits, labels, ignore_index=0)},
    "smoothed": lambda logits, labels: F.cross_entropy(logits, labels, weight=WEIGHTS, label_smoothing=0.2),
    "nll": lambda logits, labels: F.nll_loss(logits.log_softmax(1), labels, weight=WEIGHTS) * 0.5,
    "with a penalty": lambda logits, labels: (
        F.cross_entropy(logits, labels, ignore_index=1) + 0.1 * logits.new_zeros(())
    ),
    "with a mean as a penalty": lambda logits, labels: (
        F.cross_entropy(logits, labels, ignore_index=1) + 0.1 * WEIGHTS.square().mean()
    ),
    "masked": masked,
    "a mean of a scalar": lambda logits, labels: F.cross_entropy(logits, labels, ignore_index=0).unsqueeze(0).mean(),
    "a mean of losses": lambda logits, labels: torch.stack(
        [F.cross_entropy(logits, labels, weight=WEIGHTS), 0.5 * F.nll_loss(logits, labels, weight=WEIGHTS)]
    ).mean(),
    "a sum of losses": lambda logits, labels: torch.stack(
        [F.cross_entropy(logits, labels, weight=WEIGHTS), 0.5 * F.nll_loss(logits, labels, weight=WEIGHTS)]
    ).sum(),
    "a sum over a count": lambda logits, labels: (
        F.cross_entropy(logits, labels, ignore_index=0, reduction="sum") / (labels != 0).sum()
    ),
    "minus a sum over a count": lambda logits, labels: (
        -(logits.log_softmax(1).gather(1, labels[:, None])[:, 0] * (labels != 1)).sum() / (labels != 1).sum()
    ),
    "labels written into": written,
    "smoothed, with classes left out": lambda logits, labels: F.cross_entropy(
        logits, labels, weight=WEIGHTS, label_smoothing=0.1, ignore_index=0
    ),
    "a sum over a count that is at least one": lambda logits, labels: (
        (F.cross_entropy(logits, labels, reduction="none") * (labels == 2)).sum() / (labels == 2).sum().clamp(min=1)
    ),
    "zero for no rows": lambda logits, labels: (
        F.cross_entropy(logits[labels == 2], labels[labels == 2]) if (labels == 2).any() else logits.sum() * 0
    ),
    "selected": selected,
    "returned": returned,
    "elements": lambda logits, labels: F.binary_cross_entropy_with_logits(logits, F.one_hot(labels, 3).float()),
}


@pytest.mark.parametrize("micro", [8, 4, 2, 1])
@pytest.mark.parametrize("name", list(MEANS))
def test_a_mean_is_the_same_in_any_number_of_micro_batches(name: str, micro: int) -> None:
    """Also where a micro-batch has nothing to average over: rows 0 and 1 are of the class that some leave out."""
    assert_as_plain(
        built(lambda: Classes(MEANS[name])), {"x": drawn(8, 4), "labels": LABELS.clone()}, steps=4, micro=micro
    )


class TwoPlayers(nn.Module):
    """The second is trained by a loss of its own; forward discards what the first has left in it."""

    def __init__(self) -> None:
        super().__init__()
        self.g, self.d = nn.Linear(4, 3), nn.Linear(3, 1)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        self.d.zero_grad()
        fake = self.g(x)
        return F.softplus(-self.d(fake)).mean() + F.mse_loss(self.d(fake.detach()), labels)


@pytest.mark.parametrize("micro", [8, 4])
def test_a_forward_that_zeroes_gradients(micro: int) -> None:
    assert_as_plain(built(TwoPlayers), rows(), steps=3, micro=micro)


def test_a_mean_over_pixels_without_the_ignored_ones() -> None:
    module = built(lambda: nn.Conv2d(3, 5, 1))
    labels = torch.randint(0, 5, (6, 4, 4), generator=torch.Generator().manual_seed(3))
    labels[0], labels[3, :3] = 255, 255

    def loss(m: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(m(batch["x"]), batch["labels"], ignore_index=255)

    data = {"x": drawn(6, 3, 4, 4), "labels": labels}
    given = Trainable.from_module(module, loss=loss)
    assert trained(given, data, micro=1)[0] == pytest.approx(trained(given, data)[0], rel=1e-5)


def test_a_model_that_shifts_its_labels_inside() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=32, resid_pdrop=0,
                                     embd_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=2)  # fmt: skip
    module = built(lambda: transformers.GPT2LMHeadModel(config))
    ids = torch.randint(4, 24, (6, 9), generator=torch.Generator().manual_seed(1))
    labels = ids.masked_fill(torch.arange(9) >= torch.tensor([[2], [9], [5], [7], [1], [4]]), -100)
    data = {"input_ids": ids, "labels": labels}
    whole = [trained(module, data, micro=micro, steps=3)[0] for micro in (6, 2, 1)]
    assert whole[1] == pytest.approx(whole[0], rel=1e-5)
    assert whole[2] == pytest.approx(whole[0], rel=1e-5)


class Counted(nn.Module):
    """Takes the global count out of its **kwargs, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.o = nn.Linear(4, 3)

    def forward(self, x: Tensor, labels: Tensor, **more: Any) -> Tensor:
        count = more.get("num_items_in_batch")
        total = F.cross_entropy(self.o(x), labels, reduction="sum")
        return total / len(x) if count is None else total / count


def test_the_global_count_reaches_a_model_through_its_keyword_arguments() -> None:
    assert_as_plain(built(Counted), {"x": drawn(8, 4), "labels": LABELS}, steps=3, micro=2)


def test_an_evaluation_weighs_its_batches_as_the_loss_does() -> None:
    """One batch of the evaluation has nothing to average over."""
    data = {"x": drawn(8, 4), "labels": LABELS}
    held_out = {"x": drawn(9, 4, seed=5), "labels": torch.tensor([0, 0, 0, 1, 2, 0, 1, 1, 2])}
    for name in ("ignore_index", "class weights", "masked"):
        module = built(lambda name=name: Classes(MEANS[name]))
        session = session_for(module, data, steps=2, held_out={"eval": held_out}, loop={"global_batch_size": 2})
        found, _ = train(session)
        with torch.no_grad():
            out = session.trainable.module.eval()(**held_out)
        expected = float(out["loss"] if isinstance(out, dict) else out)
        assert found.of("eval", "loss") == pytest.approx([expected], rel=1e-5), name


def test_a_builders_own_weight_is_not_overruled() -> None:
    """Its loss says a mean over rows; the builder says that rows count by their second feature."""

    def loss(module: nn.Module, batch: dict[str, Tensor]) -> LossOutput:
        return LossOutput(F.mse_loss(module(batch["x"]), batch["labels"]))

    given = Trainable(built(lambda: nn.Linear(4, 1)), loss, weight=lambda batch: int(batch["x"][:, 1].gt(0).sum()) + 1)
    data = rows()
    session = session_for(given, data, micro=4, steps=1)
    found, _ = train(session)
    order = [session.loader.one(part) for part in session.loader.batches.rank_indices(
        session.loader.global_batch(type(session.state.cursor)()).indices)]  # fmt: skip
    module = built(lambda: nn.Linear(4, 1))
    means = [(loss(module, one.batch).loss.item(), one.weight) for one in order]
    assert len({weight for _, weight in means}) > 1
    expected = sum(mean * weight for mean, weight in means) / sum(weight for _, weight in means)
    assert found.losses == pytest.approx([expected], rel=1e-6)


def test_a_compiled_model_tells_what_its_loss_is_a_mean_over() -> None:
    """A compiled graph as a whole would hide it; the compiler leaves the loss out of it."""
    data = {"x": drawn(8, 4), "labels": LABELS}
    for name in ("class weights", "ignore_index"):
        module = built(lambda name=name: Classes(MEANS[name]))
        assert_as_plain(module, data, steps=3, micro=2, near=1e-5, loop={"compile": "default"})


class CallsBackward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.o = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden = self.a(x)
        if self.training:
            (0.1 * hidden.square().mean()).backward(retain_graph=True)
        return F.mse_loss(self.o(hidden), labels)


def test_a_forward_that_calls_backward_is_refused_where_its_step_is_split() -> None:
    assert_as_plain(built(CallsBackward), rows(), steps=3)
    with pytest.raises(RunError, match=r"forward calls backward: .* loop\.micro_batch_size whole"):
        trained(built(CallsBackward), rows(), micro=4)


def test_means_over_different_counts_say_that_they_cannot_be_weighed() -> None:
    def two(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels, ignore_index=0) + F.cross_entropy(logits, labels, ignore_index=1)

    data = {"x": drawn(8, 4), "labels": LABELS}
    for micro, said in ((4, 1), (8, 0)):
        events = trained(built(lambda: Classes(two)), data, micro=micro, steps=3)[2].events
        found = [one for one in events if one.get("what") == "loss_weight"]
        assert len(found) == said and all('"weight"' in one["reason"] for one in found)


def test_a_constant_loss_of_a_micro_batch_without_labels_counts_for_nothing() -> None:
    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        known = labels != 0
        return F.cross_entropy(logits[known], labels[known]) if known.any() else torch.zeros(())

    assert_as_plain(built(lambda: Classes(loss)), {"x": drawn(8, 4), "labels": LABELS}, steps=3, micro=1)


def test_layers_with_parametrizations_are_blocks_of_one_class() -> None:
    spectral = torch.nn.utils.parametrizations.spectral_norm
    module = built(
        lambda: nn.Sequential(nn.ModuleList(spectral(nn.Linear(4, 4)) for _ in range(3)), nn.Bilinear(4, 4, 1))
    )
    assert [name for name, _ in repeated(module)] == ["0.0", "0.1", "0.2"]
