"""One layer's start, from its teacher and what that saw and said."""

from __future__ import annotations

import torch

from tc.config import Decay, InitConfig, OutputGate, ReadOut, ValueScale, WriteGate
from tc.init.dynamics import centre_rows, concentrations, half_lives, set_decay, set_write_gate
from tc.init.gate import open_gate, perturb_gate, scale_read_out, scale_values, silence_gate
from tc.init.projections import copy_projections
from tc.init.read_out import solve_read_out
from tc.stats import LayerBatch
from tc.student.mixer import GatedDeltaNet, MixerForm
from tc.teacher.attention import Attention

LARGEST_SEED = 2**63 - 1


def needs_activations(cfg: InitConfig) -> bool:
    """Whether an init, or the alignment that follows it, needs a calibration."""
    return (
        cfg.align
        or cfg.decay is Decay.half_life
        or cfg.write_gate is WriteGate.entropy
        or cfg.gate in (OutputGate.open, OutputGate.perturb)
        or cfg.value_scale is not ValueScale.none
        or cfg.read_out is ReadOut.ridge
    )


def fresh_mixer(attention: Attention, layer_idx: int, form: MixerForm, seed: int) -> GatedDeltaNet:
    """A mixer with the teacher's projections and FLA's random dynamics (`copy_only`).

    The draw depends on seed and layer alone, so a layer starts alike under every policy.

    Args:
        attention: the teacher's attention module.
        layer_idx: the layer's index.
        form: the mixer's form.
        seed: of the run.

    Returns:
        A float32 mixer on the teacher's device.
    """
    device = attention.q_proj.weight.device
    hidden = attention.q_proj.in_features
    head_dim = attention.head_dim
    num_heads = attention.q_proj.out_features // head_dim
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed((seed * 100_003 + layer_idx) % LARGEST_SEED)
        mixer = GatedDeltaNet(hidden, num_heads, head_dim, layer_idx, form)
    copy_projections(mixer, attention)
    return mixer.to(device)


def initialise(
    mixer: GatedDeltaNet,
    attention: Attention,
    statistics: dict[str, torch.Tensor],
    parts: dict[str, LayerBatch],
    cfg: InitConfig,
) -> dict[str, float]:
    """Applies the equations that `cfg` names to a fresh mixer, in place.

    Args:
        mixer: from `fresh_mixer`.
        attention: the teacher's attention module, in float32.
        statistics: the layer's attention statistics, each `[H]`.
        parts: the layer's activations, `calibration` and `selection`.
        cfg: which equations.

    Returns:
        What was chosen on the way, such as the ridge strength.
    """
    calibration = parts["calibration"]
    mean_x = calibration.x.double().mean((0, 1))
    if cfg.decay is Decay.half_life:
        set_decay(mixer, half_lives(statistics, cfg.sinks, cfg.half_life_scale))
    if cfg.decay is Decay.half_life and cfg.centre_decay:
        centre_rows(mixer, mean_x)
    if cfg.write_gate is WriteGate.entropy:
        beta = cfg.beta_low + cfg.beta_span * concentrations(statistics, cfg.sinks)
        set_write_gate(mixer, beta, mean_x)
    if cfg.value_scale is ValueScale.value:
        scale_values(mixer, calibration)
    set_gate(mixer, attention, calibration, cfg)
    if cfg.value_scale is ValueScale.read_out:
        scale_read_out(mixer, calibration)
    if cfg.read_out is ReadOut.ridge:
        return solve_read_out(mixer, attention, calibration, parts["selection"], cfg.ridge)
    return {}


def set_gate(
    mixer: GatedDeltaNet, attention: Attention, calibration: LayerBatch | None, cfg: InitConfig
) -> None:
    """Applies the output gate's start alone, in place."""
    if cfg.gate is OutputGate.zero:
        silence_gate(mixer)
    elif cfg.gate is OutputGate.open:
        assert calibration is not None
        open_gate(mixer, calibration.x.double().mean((0, 1)))
    elif cfg.gate is OutputGate.perturb:
        assert calibration is not None
        perturb_gate(mixer, attention, calibration, cfg.gate_rms)
