"""The losses of recovery against plain ones on full logits: values, gradients, memory."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from op_cases import rel_rms, worst
from watching import Watch

from tc.errors import TCError
from tc.recovery.losses import (
    FAINTEST,
    IGNORED,
    DistillationLoss,
    distillation_loss,
    fla_kl,
    layer_distance,
    stream_error,
)

N, D, E, V = 12, 6, 8, 33
WEIGHTS = {"kl": {}, "ce": {"kl": 0.0, "ce": 1.0}, "both": {"kl": 0.7, "ce": 0.3}}
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-6}
Inputs = dict[str, torch.Tensor]
Loss = Callable[..., DistillationLoss]


def make(tokens: int = N, dtype: torch.dtype = torch.float64) -> Inputs:
    """Random inputs; every third token has no target."""
    draw = torch.Generator().manual_seed(tokens)
    shapes = {"student": (tokens, D), "teacher": (tokens, E)}
    shapes |= {"student_head": (V, D), "teacher_head": (V, E)}
    inputs = {n: torch.randn(s, generator=draw).to(dtype) for n, s in shapes.items()}
    targets = torch.randint(V, (tokens,), generator=draw)
    targets[1::3] = IGNORED
    return inputs | {"targets": targets}


def plain_distillation_loss(
    student: torch.Tensor,
    teacher: torch.Tensor,
    student_head: torch.Tensor,
    teacher_head: torch.Tensor,
    targets: torch.Tensor,
    *,
    kl: float = 1.0,
    ce: float = 0.0,
    temperature: float = 1.0,
) -> DistillationLoss:
    """The reference, on full logits."""
    logits = student @ student_head.T
    log_p, log_q = (
        (x / temperature).log_softmax(-1) for x in (logits, (teacher @ teacher_head.T).detach())
    )
    divergence = F.kl_div(log_p, log_q, log_target=True, reduction="batchmean") * temperature**2
    entropy = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum") / len(logits)
    total = kl * divergence + ce * entropy
    zero = torch.zeros(())
    return DistillationLoss(total, divergence if kl else zero, entropy if ce else zero)


def skips_last_chunk(
    student: torch.Tensor,
    teacher: torch.Tensor,
    student_head: torch.Tensor,
    teacher_head: torch.Tensor,
    targets: torch.Tensor,
    rows: int,
    **options: float,
) -> DistillationLoss:
    """A control that is wrong on purpose."""
    end = (len(student) - 1) // rows * rows
    loss = distillation_loss(
        student[:end],
        teacher[:end],
        student_head,
        teacher_head,
        targets[:end],
        rows=rows,
        **options,
    )
    return DistillationLoss(*(x * end / len(student) for x in loss))


def run(loss_of: Loss, inputs: Inputs, factor: float = 1.0, **options: float) -> Inputs:
    """The loss, its parts, and the student's gradients of `factor` times the loss."""
    inputs = {
        n: x.detach().clone().requires_grad_(n.startswith("student")) for n, x in inputs.items()
    }
    loss = loss_of(**inputs, **options)
    (factor * loss.total).backward()
    found = {"student": inputs["student"].grad, "head": inputs["student_head"].grad}
    return {**{n: x.detach() for n, x in loss._asdict().items()}, **found}


def half(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16() if x.is_floating_point() else x


def exact(inputs: Inputs) -> Inputs:
    return {n: x.double() if x.is_floating_point() else x for n, x in inputs.items()}


def error(loss_of: Loss, inputs: Inputs, **options: float) -> float:
    """The largest relative RMS error of loss, parts and gradients, by the plain loss in float64."""
    truth = run(plain_distillation_loss, exact(inputs), **options)
    return worst(run(loss_of, inputs, **options), truth)[0]


def deaf(loss_of: Loss, rows: int, **options: float) -> list[int]:
    """The chunks that may change without the loss and every gradient changing as plain ones do."""
    found = []
    for chunk, start in enumerate(range(0, N, rows)):
        changes = []
        for f in (partial(loss_of, rows=rows), plain_distillation_loss):
            before, after = make(), make()
            before["targets"][:] = after["targets"][:] = torch.arange(N)
            after["student"][start] += 0.5
            before, after = (run(f, x, **options) for x in (before, after))
            changes.append({n: after[n] - before[n] for n in ("total", "student", "head")})
        assert min(x.abs().max() for x in changes[1].values()) > 1e-3
        if worst(*changes)[0] > 1e-8:
            found.append(chunk)
    return found


def watched(
    loss_of: Loss, inputs: Inputs, trained: tuple[str, ...] = ("student", "student_head")
) -> Watch:
    """What forward and backward pass made."""
    for name in trained:
        inputs[name].requires_grad_()
    with Watch(inputs) as watch:
        loss = loss_of(**inputs).total
        if loss.requires_grad:
            loss.backward()
    return watch


class TestValuesAndGradients:
    @pytest.mark.parametrize("dtype", TOLERANCE)
    @pytest.mark.parametrize("temperature", [1.0, 2.0])
    @pytest.mark.parametrize("weights", WEIGHTS)
    def test_are_the_plain_ones(self, weights: str, temperature: float, dtype: torch.dtype) -> None:
        """Whole chunks, a shorter last one, one for all tokens, and one for each."""
        options = {**WEIGHTS[weights], "temperature": temperature}
        for tokens, rows in product((1, 5, N), (1, 4, 5, 100)):
            inputs = make(tokens, dtype)
            found = error(partial(distillation_loss, rows=rows), inputs, **options)
            assert found < TOLERANCE[dtype], (tokens, rows)

    @pytest.mark.parametrize("weights", WEIGHTS)
    def test_pass_gradcheck(self, weights: str) -> None:
        inputs = make(5)
        teacher, head, targets = (inputs[n] for n in ("teacher", "teacher_head", "targets"))

        def total(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            options = {**WEIGHTS[weights], "temperature": 1.5, "rows": 2}
            return distillation_loss(x, teacher, w, head, targets, **options).total

        trained = [inputs[n].requires_grad_() for n in ("student", "student_head")]
        assert torch.autograd.gradcheck(total, trained)

    @pytest.mark.parametrize("rows", [4, 5])
    @pytest.mark.parametrize("weights", WEIGHTS)
    def test_every_chunk_counts(self, weights: str, rows: int) -> None:
        options = WEIGHTS[weights]
        assert deaf(distillation_loss, rows, **options) == []
        wrong = partial(skips_last_chunk, rows=rows)
        assert deaf(skips_last_chunk, rows, **options) == [math.ceil(N / rows) - 1]
        assert error(wrong, make(), **options) > 0.01

    def test_are_scaled_by_what_comes_back(self) -> None:
        once = run(distillation_loss, make())
        thrice = run(distillation_loss, make(), factor=3.0)
        for name in ("student", "head"):
            torch.testing.assert_close(thrice[name], 3 * once[name], rtol=1e-14, atol=0)

    def test_a_second_way_back_gives_the_same(self) -> None:
        inputs = make()
        student = inputs["student"].requires_grad_()
        total = distillation_loss(**inputs).total
        first, second = (torch.autograd.grad(total, student, retain_graph=True) for _ in "12")
        assert torch.equal(first[0], second[0])

    @pytest.mark.parametrize("weights", WEIGHTS)
    def test_two_halves_add_up_to_the_whole(self, weights: str) -> None:
        """However the tokens that have a target are spread over them."""
        inputs, options = make(), WEIGHTS[weights]
        inputs["targets"][: N // 2] = IGNORED
        whole = run(distillation_loss, inputs, rows=5, **options)
        per_token = ("student", "teacher", "targets")
        halves = [
            {n: x[part] if n in per_token else x for n, x in inputs.items()}
            for part in (slice(None, N // 2), slice(N // 2, None))
        ]
        a, b = (run(distillation_loss, half, 0.5, rows=5, **options) for half in halves)
        summed = {n: (a[n] + b[n]) / 2 for n in DistillationLoss._fields}
        summed |= {
            "student": torch.cat([a["student"], b["student"]]),
            "head": a["head"] + b["head"],
        }
        assert worst(summed, whole)[0] < 1e-14

    def test_no_target_at_all(self) -> None:
        inputs = make()
        inputs["targets"].fill_(IGNORED)
        found = run(distillation_loss, inputs, kl=0.0, ce=1.0)
        assert not any(x.any() for x in found.values())

    def test_columns_in_memory_are_as_good_as_rows(self) -> None:
        inputs = {n: x.T.contiguous().T if x.dim() == 2 else x for n, x in make().items()}
        assert not inputs["student"].is_contiguous()
        assert error(partial(distillation_loss, rows=5), inputs, kl=0.7, ce=0.3) < 1e-10

    def test_only_the_total_has_a_gradient(self) -> None:
        inputs = {n: x.requires_grad_(x.is_floating_point()) for n, x in make().items()}
        loss = distillation_loss(**inputs, kl=0.7, ce=0.3)
        assert [x.requires_grad for x in loss] == [True, False, False]
        torch.testing.assert_close(loss.total, 0.7 * loss.kl + 0.3 * loss.ce)
        loss.total.backward()
        assert inputs["teacher"].grad is None and inputs["teacher_head"].grad is None

    def test_what_has_no_weight_is_not_read(self) -> None:
        inputs = make()
        student, head = inputs["student"], inputs["student_head"]
        entropy = distillation_loss(
            student, None, head, None, inputs["targets"], kl=0.0, ce=1.0, temperature=3.0
        )
        both = distillation_loss(**inputs, ce=1.0)
        assert entropy.kl == 0
        assert entropy.total == entropy.ce == both.ce
        divergence = distillation_loss(student, inputs["teacher"], head, inputs["teacher_head"])
        assert divergence.ce == 0
        assert divergence.total == divergence.kl == both.kl


class TestPrecision:
    def test_half_precision(self) -> None:
        """Its logits and their gradients are rounded to 8 bits, its sums are not."""
        inputs = make(200, torch.bfloat16)
        for rows in (1, 64):
            found = run(partial(distillation_loss, rows=rows), inputs, kl=0.7, ce=0.3)
            assert found["total"].dtype == torch.float32
            assert found["student"].dtype == found["head"].dtype == torch.bfloat16
            truth = run(plain_distillation_loss, exact(inputs), kl=0.7, ce=0.3)
            assert rel_rms(found["total"], truth["total"]) < 2e-3
            assert max(rel_rms(found[n], truth[n]) for n in ("student", "head")) < 1e-2

    def test_the_heads_gradient_is_not_summed_in_half_precision(self) -> None:
        inputs = make(500, torch.bfloat16)
        truth = run(plain_distillation_loss, exact(inputs))["head"]
        found = run(partial(distillation_loss, rows=1), inputs)["head"]
        rounded = torch.zeros_like(found)
        for t in range(500):
            token = {n: x if "head" in n else x[t : t + 1] for n, x in inputs.items()}
            rounded += run(distillation_loss, token)["head"] / 500
        assert rel_rms(found, truth) < 1e-2 < rel_rms(rounded, truth)

    @pytest.mark.parametrize("inside", [True, False])
    def test_autocast_multiplies_in_its_dtype(self, inside: bool) -> None:
        """And all else is as wide as the inputs, wherever the way back runs."""
        inputs = make(200, torch.float32)
        rounded = run(distillation_loss, {n: half(x) for n, x in inputs.items()})
        trained = [inputs[n].requires_grad_() for n in ("student", "student_head")]
        with Watch(inputs) as watch, torch.autocast("cpu", torch.bfloat16):
            total = distillation_loss(**inputs).total
            if inside:
                total.backward()
        if not inside:
            total.backward()
        assert set(watch.products) == {torch.bfloat16}
        assert total == rounded["total"]
        for x, name in zip(trained, ("student", "head"), strict=True):
            assert x.grad.dtype == torch.float32
            assert 0 < rel_rms(x.grad, rounded[name]) < 4e-3

    def test_autocast_leaves_float64_alone(self) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            assert error(distillation_loss, make()) < 1e-10

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("name", ["student", "teacher", "student_head", "teacher_head"])
    def test_what_is_not_finite_makes_the_loss_so(self, name: str, value: float) -> None:
        inputs = make()
        inputs[name][1, 2] = value
        assert not distillation_loss(**inputs, rows=5).total.isfinite()
        if name.startswith("student"):
            assert inputs["targets"][1] == IGNORED
            assert not distillation_loss(**inputs, rows=5, kl=0.0, ce=1.0).total.isfinite()


class TestMemory:
    TOKENS, VOCABULARY, WIDTH, ROWS = 256, 6144, 72, 32
    """An eighth of 2048 tokens of a vocabulary of 49152, width 576, and of 256 rows."""

    def inputs(self) -> Inputs:
        shape = {"student": self.TOKENS, "teacher": self.TOKENS}
        shape |= {"student_head": self.VOCABULARY, "teacher_head": self.VOCABULARY}
        inputs = {name: torch.randn(rows, self.WIDTH) for name, rows in shape.items()}
        return inputs | {"targets": torch.randint(self.VOCABULARY, (self.TOKENS,))}

    @pytest.mark.parametrize("weights", WEIGHTS)
    @pytest.mark.parametrize("trained", [("student",), ("student", "student_head")])
    def test_an_eighth_of_the_plain_loss(self, trained: tuple[str, ...], weights: str) -> None:
        options = {**WEIGHTS[weights], "temperature": 2.0}
        chunked = partial(distillation_loss, rows=self.ROWS, **options)
        found = watched(chunked, self.inputs(), trained)
        plain = watched(partial(plain_distillation_loss, **options), self.inputs(), trained)
        assert found.peak < plain.peak / 8
        logits = self.ROWS * self.VOCABULARY
        assert found.largest == max(logits, self.VOCABULARY * self.WIDTH)
        assert plain.largest == self.TOKENS * self.VOCABULARY
        assert found.peak < 4 * (3.2 * logits + 2.1 * self.VOCABULARY * self.WIDTH)

    def test_what_is_not_trained_is_not_computed(self) -> None:
        """Products of three chunks: two for logits, and one for each gradient that is wanted."""
        loss, head = partial(distillation_loss, rows=4), (V, D)
        both = watched(loss, make())
        assert len(both.products) == 12 and head in both.shapes
        frozen = watched(loss, make(), ("student",))
        assert len(frozen.products) == 9 and head not in frozen.shapes
        only_head = watched(loss, make(), ("student_head",))
        assert len(only_head.products) == 9 and (N, D) not in only_head.shapes
        neither = watched(loss, make(), ())
        assert len(neither.products) == 6 and not {head, (N, D)} & neither.shapes
        with torch.no_grad():
            silent = watched(loss, make())
        assert len(silent.products) == 6 and not {head, (N, D)} & silent.shapes

    def test_no_teacher_no_products(self) -> None:
        loss = partial(distillation_loss, rows=4, kl=0.0, ce=1.0)
        assert len(watched(loss, make(), ()).products) == 3


WRONG = {
    "no weight": {"kl": 0.0},
    "temperature": {"temperature": 0.0},
    "rows": {"rows": 0},
    "no teacher": {"teacher": None},
    "no teacher's head": {"teacher_head": None},
    "no targets": {"targets": None, "ce": 1.0},
    "more tokens than the student's": {"teacher": torch.zeros(N + 1, E)},
    "another vocabulary": {"teacher_head": torch.zeros(V + 1, E)},
    "another width": {"student_head": torch.zeros(V, D + 1)},
    "fewer targets": {"targets": torch.zeros(N - 1, dtype=torch.long), "ce": 1.0},
    "a batch": {"student": torch.zeros(2, N, D)},
    "no tokens": {"student": torch.zeros(0, D), "teacher": torch.zeros(0, E)},
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_inputs_are_errors(what: str) -> None:
    with pytest.raises(ValueError, match=r"must be|wanted|nothing"):
        distillation_loss(**{**make(dtype=torch.float32), **WRONG[what]})


class TestLayerDistance:
    def test_is_the_formula(self) -> None:
        student, teacher = torch.randn(2, 2, 5, 7, dtype=torch.float64)
        lengths = [
            math.dist(s, t) / 7**0.5
            for s, t in zip(student.view(-1, 7).tolist(), teacher.view(-1, 7).tolist(), strict=True)
        ]
        assert layer_distance(student, teacher).item() == pytest.approx(sum(lengths) / 10)
        student.requires_grad_()
        assert torch.autograd.gradcheck(layer_distance, (student, teacher))

    def test_where_both_are_equal_its_gradient_is_zero(self) -> None:
        teacher = torch.randn(3, 7)
        student = teacher.clone()
        student[1] += 1
        student.requires_grad_()
        layer_distance(student, teacher).backward()
        assert student.grad.isfinite().all()
        assert student.grad.any(1).tolist() == [False, True, False]

    def test_is_in_float32_at_least(self) -> None:
        student, teacher = torch.randn(2, 5, 7).bfloat16()
        found = layer_distance(student, teacher)
        assert found.dtype == torch.float32
        assert found == layer_distance(student.float(), teacher.float())


class TestStreamError:
    def test_is_the_formula(self) -> None:
        student, teacher = (
            [torch.randn(2, 5, 7, dtype=torch.float64) for _ in range(3)] for _ in "st"
        )
        ratios = [
            ((s - t).norm(dim=-1) / t.norm(dim=-1)).square()
            for s, t in zip(student, teacher, strict=True)
        ]
        torch.testing.assert_close(stream_error(student, teacher), torch.stack(ratios).mean())
        assert stream_error(teacher, teacher) == 0

    def test_a_teacher_that_says_nothing_is_no_division_by_zero(self) -> None:
        student, teacher = torch.full((1, 1, 4), 1e-3), torch.zeros(1, 1, 4)
        student.requires_grad_()
        error = stream_error([student], [teacher])
        error.backward()
        assert error.item() == pytest.approx(1e-6 / FAINTEST)
        assert student.grad.isfinite().all()

    def test_is_in_float32_at_least(self) -> None:
        student, teacher = torch.randn(2, 1, 5, 7).bfloat16()
        found = stream_error(student[None], teacher[None])
        assert found.dtype == torch.float32
        assert found == stream_error(student[None].float(), teacher[None].float())

    def test_another_number_of_layers_is_an_error(self) -> None:
        with pytest.raises(ValueError):
            stream_error([torch.ones(1, 2)], [torch.ones(1, 2)] * 2)


needs_fla = pytest.mark.skipif(
    not all(find_spec(name) for name in ("fla", "triton")),
    reason="needs flash-linear-attention and triton",
)


@needs_fla
@pytest.mark.slow
def test_flas_kernel_gives_our_numbers() -> None:
    """In a process of its own: there Triton is the interpreter."""
    here = Path(__file__).parent
    paths = [here.parents[1], here.parent / "student", os.environ.get("PYTHONPATH", "")]
    result = subprocess.run(
        [sys.executable, str(here / "fla_kl_interpreted.py")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"},
        timeout=120,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    found = json.loads(result.stdout.splitlines()[-1])
    for case in ("ours", "fla", "fla scaled"):
        assert not any(not x < 1e-5 for x in found[case].values()), case
    assert min(found["reversed"].values()) > 1e-2


def test_fla_is_asked_for_where_it_is_missing(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "fla.modules.fused_kl_div", None)
    inputs = make()
    del inputs["targets"]
    with pytest.raises(TCError, match="kl_backend=chunk"):
        fla_kl(**inputs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnGPU:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_ours(self, dtype: torch.dtype) -> None:
        inputs = {n: x.cuda() for n, x in make(100, dtype).items()}
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        assert error(partial(distillation_loss, rows=33), inputs, kl=0.7, ce=0.3) < tolerance

    @needs_fla
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_flas(self, dtype: torch.dtype) -> None:
        inputs = {n: x.cuda() for n, x in make(100, dtype).items()}

        def loss_of(targets: torch.Tensor, **inputs: torch.Tensor) -> DistillationLoss:
            kl = fla_kl(**inputs)
            return DistillationLoss(kl, kl, torch.zeros(()))

        assert error(loss_of, inputs) < (1e-5 if dtype == torch.float32 else 1e-2)
