"""What recovery minimises, as pure functions.

Shape letters: N tokens, D model dim, V vocabulary, R tokens of a chunk.

The logits of N tokens would be the largest tensors of a training step, and all that is wanted of
them is a number and its gradient. With p and q the student's and the teacher's softmax of logits
over the temperature t, and c one-hot at the target:

    d t^2 KL(q || p) / d logits = t (p - q)
    d CE / d logits = p - c    (p at temperature 1)

So each chunk of R tokens gives its part of the loss and of both gradients, by the student's hidden
states and by its head, while its logits are at hand; nothing `[N, V]` is ever held. Liger and FLA
do the same in Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from tc.errors import TCError

IGNORED = -100
"""The target of a token that nothing is to be predicted after."""

ROWS = 256
"""Tokens of a chunk: more save time, fewer save memory.

For 2048 tokens, V = 49152 and D = 576 on a CPU, 512 take 0.86 of the time and 1.8 times the memory.
"""

FAINTEST = 1e-6
"""The least mean square of a teacher's hidden state that an error is measured relative to."""


def layer_distance(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """The mean over tokens of ||student - teacher|| / sqrt(D) (arXiv 2606.16429, stage 1).

    Args:
        student: `[..., D]`.
        teacher: of the same shape.

    Returns:
        A number in float32 (float64 for float64 inputs). The gradient by a token without any
        difference is 0.
    """
    difference = _wide(student) - _wide(teacher)
    return torch.linalg.vector_norm(difference, dim=-1).mean() / difference.shape[-1] ** 0.5


def stream_error(student: Sequence[torch.Tensor], teacher: Sequence[torch.Tensor]) -> torch.Tensor:
    """The mean over layers and tokens of ||student - teacher||^2 / ||teacher||^2.

    Args:
        student: hidden states `[..., D]`, one tensor a layer.
        teacher: as many, of the same shapes. A token whose mean square is below `FAINTEST` counts
            as if it were that large.

    Returns:
        A number in float32 (float64 for float64 inputs).

    Raises:
        ValueError: if one has more layers than the other.
    """
    errors = []
    for s, t in zip(map(_wide, student), map(_wide, teacher), strict=True):
        power = t.square().mean(-1).clamp_min(FAINTEST)
        errors.append(((s - t).square().mean(-1) / power).mean())
    return torch.stack(errors).mean()


class DistillationLoss(NamedTuple):
    """A loss and its parts.

    Attributes:
        total: what is minimised; it alone has a gradient.
        kl: KL(teacher || student) times the squared temperature; 0 where its weight is 0.
        ce: the cross-entropy; 0 where its weight is 0.
    """

    total: torch.Tensor
    kl: torch.Tensor
    ce: torch.Tensor


def distillation_loss(
    student: torch.Tensor,
    teacher: torch.Tensor | None,
    student_head: torch.Tensor,
    teacher_head: torch.Tensor | None,
    targets: torch.Tensor | None = None,
    *,
    kl: float = 1.0,
    ce: float = 0.0,
    temperature: float = 1.0,
    rows: int = ROWS,
) -> DistillationLoss:
    """`kl` times the KL divergence from the teacher plus `ce` times the cross-entropy with targets.

    Both are sums over tokens divided by N, the cross-entropy too, however many tokens have no
    target: the mean over micro-batches of one size is the loss of the whole batch. Logits are
    products in the inputs' dtype, or in autocast's; softmaxes, losses and the sum of the head's
    gradient are in float32 (float64 for float64 inputs). What is not finite in an input that is
    read makes the loss not finite.

    Args:
        student: hidden states that the head reads, `[N, D]`.
        teacher: the teacher's, `[N, D']`; gets no gradient. Not read where `kl` is 0.
        student_head: weight of the output layer, `[V, D]`.
        teacher_head: the teacher's, `[V, D']`; gets no gradient. Not read where `kl` is 0.
        targets: Long `[N]`, `IGNORED` where there is none. Not read where `ce` is 0.
        kl: weight of KL(teacher || student), which is multiplied by the squared temperature.
        ce: weight of the cross-entropy, whose temperature is 1.
        temperature: of both softmaxes of the KL divergence, above 0.
        rows: R, tokens of a chunk; three tensors `[R, V]` are held, and in half precision one more.

    Returns:
        The loss and its parts, numbers in float32 (float64 for float64 inputs).

    Raises:
        ValueError: for shapes that do not fit, an input that is missing though its term has a
            weight, or options out of their ranges.
    """
    if not kl:
        teacher, teacher_head, temperature = None, None, 1.0
    if not ce:
        targets = None
    options = _Options(kl, ce, temperature, rows)
    _check(student, teacher, student_head, teacher_head, targets, options)
    return DistillationLoss(
        *_Distillation.apply(
            student,
            student_head,
            teacher,
            teacher_head,
            targets,
            options,
            torch.is_grad_enabled(),
        )
    )


def fla_kl(
    student: torch.Tensor,
    teacher: torch.Tensor,
    student_head: torch.Tensor,
    teacher_head: torch.Tensor,
) -> torch.Tensor:
    """KL(teacher || student) by FLA's fused Triton kernel, for CUDA tensors.

    The temperature is 1, and there is no cross-entropy.

    Args:
        student: hidden states that the head reads, `[N, D]`.
        teacher: the teacher's, `[N, D']`; gets no gradient.
        student_head: weight of the output layer, `[V, D]`.
        teacher_head: the teacher's, `[V, D']`; gets no gradient.

    Returns:
        The mean over tokens, a number in float32.

    Raises:
        TCError: if flash-linear-attention is not installed.
    """
    try:
        from fla.modules.fused_kl_div import fused_kl_div_loss
    except ImportError as error:
        raise TCError(
            "recovery.kl_backend=fla needs flash-linear-attention: pip install "
            "'taylor-calibrate[gpu]', or take recovery.kl_backend=chunk"
        ) from error
    loss: torch.Tensor = fused_kl_div_loss(
        student, teacher.detach(), student_head, teacher_head.detach()
    )
    return loss


@dataclass(frozen=True)
class _Options:
    """As `distillation_loss` has them."""

    kl: float
    ce: float
    temperature: float
    rows: int


class _Distillation(torch.autograd.Function):
    """The loss, its gradients made on the way forward: the way back only scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        student: torch.Tensor,
        student_head: torch.Tensor,
        teacher: torch.Tensor | None,
        teacher_head: torch.Tensor | None,
        targets: torch.Tensor | None,
        options: _Options,
        with_gradients: bool,
    ) -> tuple[torch.Tensor, ...]:
        wanted = [with_gradients and need for need in ctx.needs_input_grad[:2]]
        sums = _Sums(student, student_head, wanted)
        sides = [_Side(student, student_head)]
        if teacher is not None and teacher_head is not None:
            sides.append(_Side(teacher, teacher_head))
        _by_chunks(sides, targets, options, sums)
        kl, ce = sums.losses.mean(1).unbind()
        ctx.save_for_backward(*sums.mean_gradients())
        ctx.mark_non_differentiable(kl, ce)
        return options.kl * kl + options.ce * ce, kl, ce

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        scaled = [None if x is None else x * gradient for x in ctx.saved_tensors]
        return (*scaled, None, None, None, None, None)


class _Side:
    """A model's hidden states `[N, D]` and head `[V, D]`, in the dtype of their products."""

    def __init__(self, hidden: torch.Tensor, head: torch.Tensor) -> None:
        self.hidden, self.head = _for_products(hidden), _for_products(head)

    def log_softmax(
        self, chunk: slice, temperature: float, room: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        """Of a chunk's logits, `[R, V]`, to `out`; `room` is overwritten."""
        if room.dtype == self.head.dtype:
            torch.mm(self.hidden[chunk], self.head.T, out=room)
        else:
            room.copy_(self.hidden[chunk] @ self.head.T)
        if temperature != 1:
            room /= temperature
        return torch.log_softmax(room, -1, out=out)


class _Sums:
    """What the chunks add up to.

    Attributes:
        losses: KL and CE of each token, `[2, N]`.
        student: gradient of the sum of losses by the student's hidden states `[N, D]`, or None.
        head: that by its head `[V, D]`, or None.
    """

    def __init__(self, student: torch.Tensor, head: torch.Tensor, wanted: Sequence[bool]) -> None:
        wide = _wide_dtype(student)
        self.losses = student.new_zeros(2, len(student), dtype=wide)
        self.student = torch.empty_like(student) if wanted[0] else None
        self.head = torch.zeros_like(head, dtype=wide) if wanted[1] else None
        self._head_dtype = head.dtype

    def add_gradient(self, chunk: slice, by_logits: torch.Tensor, side: _Side) -> None:
        """Adds what a chunk's gradient by its logits, `[R, V]`, gives."""
        by_logits = by_logits.to(side.head.dtype)
        if self.student is not None:
            self.student[chunk] = by_logits @ side.head
        if self.head is not None and self.head.dtype == by_logits.dtype:
            self.head.addmm_(by_logits.T, side.hidden[chunk])
        elif self.head is not None:
            self.head += by_logits.T @ side.hidden[chunk]

    def mean_gradients(self) -> Sequence[torch.Tensor | None]:
        """Both gradients over N, in the dtype of what they are by; `self` is used up."""
        N = self.losses.shape[1]
        student = None if self.student is None else self.student.div_(N)
        head = None if self.head is None else self.head.div_(N).to(self._head_dtype)
        return student, head


def _by_chunks(
    sides: Sequence[_Side], targets: torch.Tensor | None, options: _Options, sums: _Sums
) -> None:
    """Adds all chunks to `sums`; sides are the student and, for a KL divergence, the teacher."""
    N, V = len(sides[0].hidden), len(sides[0].head)
    shape = min(options.rows, N), V
    rooms = [sums.losses.new_empty(shape) for _ in range(1 + len(sides))]
    for start in range(0, N, options.rows):
        chunk = slice(start, min(start + options.rows, N))
        part = [room[: chunk.stop - start] for room in rooms]
        sums.losses[:, chunk], by_logits = _chunk(sides, targets, options, chunk, part)
        sums.add_gradient(chunk, by_logits, sides[0])


def _chunk(
    sides: Sequence[_Side],
    targets: torch.Tensor | None,
    options: _Options,
    chunk: slice,
    rooms: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """A chunk's losses `[2, R]` and the gradient of their sum by the student's logits `[R, V]`.

    The gradient is in one of the rooms, all of which are overwritten.
    """
    t = options.temperature
    log_p = sides[0].log_softmax(chunk, t, rooms[0], out=rooms[1])
    losses, gradients = log_p.new_zeros(2, len(log_p)), []
    if len(sides) > 1:
        log_q = sides[1].log_softmax(chunk, t, rooms[0], out=rooms[2])
        kl, by_kl = _kl(log_p, log_q, rooms[0])
        losses[0] = kl * t**2
        gradients.append(by_kl.mul_(options.kl * t))
    if targets is not None:
        if t != 1:
            # As good as the logits: a softmax does not see that a row has lost one number.
            log_p = torch.log_softmax(log_p.mul_(t), -1, out=rooms[0])
        losses[1], by_ce = _ce(log_p, targets[chunk])
        gradients.append(by_ce.mul_(options.ce))
    return losses, gradients[0] if len(gradients) == 1 else gradients[0].add_(gradients[1])


def _kl(
    log_p: torch.Tensor, log_q: torch.Tensor, room: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """KL(q || p) of each row `[R]`, and p - q in the place of `log_q`; `room` is overwritten."""
    q = torch.exp(log_q, out=room)
    kl = log_q.sub_(log_p).mul_(q).sum(-1)
    return kl, torch.exp(log_p, out=log_q).sub_(q)


def _ce(log_p: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The cross-entropy of each row `[R]`, and its gradient in the place of `log_p`."""
    ignored = targets == IGNORED
    index = targets.masked_fill(ignored, 0)[:, None]
    # A factor, and no mask, so that a NaN does not go unseen.
    counts = (~ignored).to(log_p.dtype)[:, None]
    ce = -log_p.gather(1, index) * counts
    p = log_p.exp_().mul_(counts)
    return ce[:, 0], p.scatter_add_(1, index, -counts)


def _wide_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _wide(x: torch.Tensor) -> torch.Tensor:
    """In float32 at least."""
    return x.to(_wide_dtype(x))


def _for_products(x: torch.Tensor) -> torch.Tensor:
    """In the dtype that autocast would multiply it in."""
    device = x.device.type
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return x
    return x.to(torch.get_autocast_dtype(device))


def _check(
    student: torch.Tensor,
    teacher: torch.Tensor | None,
    student_head: torch.Tensor,
    teacher_head: torch.Tensor | None,
    targets: torch.Tensor | None,
    options: _Options,
) -> None:
    if not (options.kl or options.ce):
        raise ValueError("kl=0 and ce=0: nothing is left to minimise; give one of them a weight")
    if options.temperature <= 0 or options.rows < 1:
        raise ValueError(f"{options}: temperature must be above 0 and rows at least 1")
    needed: dict[str, torch.Tensor | None] = {"student": student, "student_head": student_head}
    if options.kl:
        needed |= {"teacher": teacher, "teacher_head": teacher_head}
    if options.ce:
        needed["targets"] = targets
    seen = {name: None if x is None else list(x.shape) for name, x in needed.items()}
    N, D, V = len(student), student.shape[-1], len(student_head)
    E = 0 if teacher is None else teacher.shape[-1]
    wanted = {"student": [N, D], "student_head": [V, D], "targets": [N]}
    wanted |= {"teacher": [N, E], "teacher_head": [V, E]}
    if N == 0 or any(seen[name] != wanted[name] for name in seen):
        raise ValueError(
            f"for kl={options.kl} and ce={options.ce} the shapes are {seen}; wanted "
            "student [N, D], student_head [V, D], teacher [N, D'], teacher_head [V, D'], "
            "targets [N], N not 0"
        )
