"""The Gated DeltaNet mixer that takes the place of an attention module.

Shape letters: B batch, T tokens, H heads, K key dim, V value dim (= K), D model dim.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import nn
from transformers.cache_utils import Cache

from tc.student.cache import recurrent_layer
from tc.student.ops import gated_delta_rule

PIECE = 2048
"""Tokens of a long text that are read at once where no gradient is wanted."""


@dataclass
class MixerForm:
    """What a mixer has besides FLA's parameters; all False is FLA's own form.

    Attributes:
        qkv_bias: q, k and v projections have a bias.
        o_bias: the output projection has a bias.
        qk_norm: an RMSNorm per head on q and k, before SiLU.
        use_gate: the output gate silu(g_proj x), as FLA's `use_gate`.
        norm_eps: epsilon of the read-out's RMSNorm.
        qk_norm_eps: epsilon of the q and k norms.
        backend: which gated delta rule runs.
    """

    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    use_gate: bool = True
    norm_eps: float = 1e-5
    qk_norm_eps: float = 1e-6
    backend: str = "auto"

    @property
    def is_fla(self) -> bool:
        """Whether FLA's `GatedDeltaNet` has every parameter of this form."""
        return not (self.qkv_bias or self.o_bias or self.qk_norm)

    def to_dict(self) -> dict[str, bool | float | str]:
        """The fields as plain values, for a config file."""
        return asdict(self)


class HeadNorm(nn.Module):
    """RMSNorm of the last dimension with a weight, in float32, optionally times silu(gate).

    The same numbers as FLA's `FusedRMSNormGated`.
    """

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        """Normalises `x` `[..., dim]`; `gate` has its shape."""
        wide = x.float()
        y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        y = y * self.weight.float()
        if gate is not None:
            y = y * F.silu(gate.float())
        return y.to(x.dtype)


class GatedDeltaNet(nn.Module):
    """FLA's `GatedDeltaNet(use_short_conv=False, expand_v=1)`, with what a teacher may add to it.

    Parameters have FLA's names, and in FLA's form (`MixerForm.is_fla`) the state dict loads into
    FLA's layer and gives the same output. The signature of `forward` is that of the attention
    modules of `transformers`, so a decoder layer cannot tell them apart.

    Args:
        hidden_size: D.
        num_heads: H, the teacher's query heads.
        head_dim: K = V.
        layer_idx: the layer's place, which is its place in a cache.
        form: what it has besides FLA's parameters.
    """

    def __init__(
        self, hidden_size: int, num_heads: int, head_dim: int, layer_idx: int, form: MixerForm
    ) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, head_dim
        self.layer_idx, self.form = layer_idx, form
        width = num_heads * head_dim
        self.q_proj = nn.Linear(hidden_size, width, bias=form.qkv_bias)
        self.k_proj = nn.Linear(hidden_size, width, bias=form.qkv_bias)
        self.v_proj = nn.Linear(hidden_size, width, bias=form.qkv_bias)
        self.a_proj = nn.Linear(hidden_size, num_heads, bias=False)
        self.b_proj = nn.Linear(hidden_size, num_heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(num_heads))
        self.dt_bias = nn.Parameter(torch.empty(num_heads))
        if form.qk_norm:
            self.q_norm = HeadNorm(head_dim, form.qk_norm_eps)
            self.k_norm = HeadNorm(head_dim, form.qk_norm_eps)
        if form.use_gate:
            self.g_proj = nn.Linear(hidden_size, width, bias=False)
        self.o_norm = HeadNorm(head_dim, form.norm_eps)
        self.o_proj = nn.Linear(width, hidden_size, bias=form.o_bias)
        self.reset_dynamics()

    @torch.no_grad()
    def reset_dynamics(self) -> None:
        """Draws A_log and dt_bias anew."""
        for parameter, value in self.fresh_dynamics():
            parameter.copy_(value)

    @torch.no_grad()
    def fresh_dynamics(self) -> tuple[tuple[nn.Parameter, torch.Tensor], ...]:
        """Values for A_log and dt_bias as FLA draws them, each with its parameter.

        A is from (0, 16), dt log-uniform from 0.001 to 0.1.
        """
        A_log = torch.empty_like(self.A_log).uniform_(0, 16).log_()
        low, high = math.log(0.001), math.log(0.1)
        dt = torch.empty_like(self.dt_bias).uniform_(low, high).exp_().clamp_(min=1e-4)
        return (self.A_log, A_log), (self.dt_bias, inverse_softplus(dt))

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        position_ids: torch.Tensor | None = None,
        **kwargs: object,
    ) -> tuple[torch.Tensor, None]:
        """Mixes a batch, continuing from the cache where there is one.

        Args:
            hidden_states: `[B, T, D]`.
            position_embeddings: unused; the recurrence knows the order.
            attention_mask: what `transformers` gives the attention modules (see `token_mask`).
            cache: a standard cache; this layer's place in it holds the recurrent state.
            position_ids: `[1 or B, T]`; without a cache, a token that does not follow its
                neighbour's position begins a document that sees nothing before it.
            **kwargs: unused.

        Returns:
            Output `[B, T, D]`, and None where an attention module gives its weights.
        """
        layer = None if cache is None else recurrent_layer(cache, self.layer_idx)
        seen = 0 if layer is None else layer.num_tokens
        B, T, _ = hidden_states.shape
        mask = token_mask(attention_mask, seen, B, T)
        resets = document_starts(position_ids, B) if cache is None else None
        state = None if layer is None else layer.state
        # Where no gradient is wanted, a long text is read in pieces: what this layer holds beside
        # its input and its output is that of one piece.
        size = T if torch.is_grad_enabled() else PIECE
        outputs = []
        for start in range(0, T, size):
            part = slice(start, start + size)
            x = hidden_states[:, part]
            real = None if mask is None else mask[:, part]
            if real is not None:
                # Else a NaN in a pad, times a gradient of zero, would reach the weights' gradients.
                x = x.masked_fill(~real[..., None], 0)
            o, state = self.read_out(
                x,
                mask=real,
                resets=None if resets is None else resets[:, part],
                state=state,
                output_final_state=layer is not None or part.stop < T,
            )
            outputs.append(self.o_proj(self.features(x, o)))
        if layer is not None and state is not None:
            layer.store(state, T)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1), None

    def read_out(
        self,
        hidden_states: torch.Tensor,
        mask: torch.Tensor | None = None,
        resets: torch.Tensor | None = None,
        state: torch.Tensor | None = None,
        output_final_state: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The state's answers before norm, gate and projection.

        Args:
            hidden_states: `[B, T, D]`.
            mask: bool `[B, T]`, False for pads, or None.
            resets: bool `[B, T]`, True where a document begins, or None.
            state: `[B, H, K, V]` to start from, or None.
            output_final_state: whether to return the state after the last token.

        Returns:
            o `[B, T, H, V]` and the state or None.
        """
        q, k, v = (self._heads(p(hidden_states)) for p in (self.q_proj, self.k_proj, self.v_proj))
        if self.form.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        return gated_delta_rule(
            F.silu(q),
            F.silu(k),
            F.silu(v),
            self.log_decay(hidden_states),
            self.b_proj(hidden_states).float().sigmoid(),
            initial_state=state,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=True,
            mask=mask,
            resets=resets,
            backend=self.form.backend,
        )

    def log_decay(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """g = -exp(A_log) softplus(a_proj x + dt_bias), `[B, T, H]`, in float32."""
        x = self.a_proj(hidden_states).float() + self.dt_bias.float()
        return -self.A_log.float().exp() * F.softplus(x)

    def features(self, hidden_states: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
        """What o_proj reads: the normed and gated read-out, `[B, T, H V]`."""
        gate = self._heads(self.g_proj(hidden_states)) if self.form.use_gate else None
        return self.o_norm(o, gate).flatten(-2)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (self.num_heads, self.head_dim))


def inverse_softplus(x: torch.Tensor) -> torch.Tensor:
    """The y with softplus(y) = x, for x > 0, accurate for small x."""
    return x + torch.log(-torch.expm1(-x))


def token_mask(
    attention_mask: torch.Tensor | None, seen: int, batch: int, num_tokens: int
) -> torch.Tensor | None:
    """Which of the new tokens are real, from any mask that attention modules are given.

    A token is padding just when it may not attend to itself, which every form says.

    Args:
        attention_mask: None (all real), `[B, seen + T]` (flash attention), or `[B, 1, T, S]`, bool
            or additive (SDPA, eager).
        seen: tokens before these.
        batch: B.
        num_tokens: T.

    Returns:
        bool `[B, T]`, or None where all are real.
    """
    if attention_mask is None:
        return None
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.dim() not in (2, 4):
        raise ValueError(
            f"attention_mask is {type(attention_mask).__name__}; a Gated DeltaNet layer reads "
            "None, [B, S] or [B, 1, T, S] tensors: take attn_implementation sdpa, eager or "
            "flash_attention_2"
        )
    new = slice(seen, seen + num_tokens)
    if attention_mask.dim() == 2:
        return attention_mask[:, new].bool().expand(batch, num_tokens)
    own = attention_mask[:, 0, :, new].diagonal(dim1=-2, dim2=-1)
    real = own >= 0 if own.is_floating_point() else own.bool()
    return real.expand(batch, num_tokens)


def document_starts(position_ids: torch.Tensor | None, batch: int) -> torch.Tensor | None:
    """Where positions do not follow on, bool `[B, T]`; None where they all do."""
    if position_ids is None or position_ids.shape[-1] < 2:
        return None
    breaks = position_ids[:, 1:] != position_ids[:, :-1] + 1
    if not breaks.any():
        return None
    return F.pad(breaks, (1, 0), value=True).expand(batch, -1)


def mixer_state(mixer: GatedDeltaNet) -> dict[str, torch.Tensor]:
    """A mixer's weights as plain tensors on the CPU."""
    return {name: value.detach().cpu() for name, value in mixer.state_dict().items()}
