"""Comparisons with flash-linear-attention: each returns relative RMS errors by name.

They import FLA, which takes seconds: on a CPU they run in the one process of `fla_interpreted.py`.
"""

from __future__ import annotations

import torch
from op_cases import make, random_resets, rel_rms, run

from tc.student.mixer import GatedDeltaNet, MixerForm
from tc.student.ops import gated_delta_rule, l2norm

Errors = dict[str, float]
T_OP, T_EVAL, T_TRAIN = 70, 32, 66


def op_options(case: str) -> dict[str, torch.Tensor]:
    mask = torch.ones(2, T_OP, dtype=torch.bool)
    mask[0, :9], mask[1, -5:] = False, False
    resets = random_resets(2, T_OP) & (torch.arange(T_OP) % 3 == 1)
    resets[1, 0] = True  # the initial state of this row counts for nothing
    return {
        "plain": {},
        "padding": {"mask": mask},
        "documents": {"resets": resets},
        "both": {"mask": mask, "resets": resets},
    }[case]


def op_errors(case: str, device: str, dtype: torch.dtype = torch.float32) -> Errors:
    """Our `fla` back end against our loop in float64: outputs, states and gradients."""
    inputs, options = make(T_OP, 16, 32, H=2, J=1), op_options(case)
    inputs |= {n: inputs[n].to(dtype).float() for n in "qkv"}
    ours = run(inputs, torch.float64, "loop", **options)
    theirs = run(inputs, dtype, "fla", device, **options)
    return {name: rel_rms(theirs[name], ours[name]) for name in ours}


def step_errors(device: str) -> Errors:
    """One token after another through the `fla` back end against the loop over all of them."""
    inputs = make(5, 16, 32)
    whole, last = gated_delta_rule(**inputs, output_final_state=True, backend="loop")
    state, outputs = inputs.pop("initial_state").to(device), []
    for t in range(5):
        token = {name: x[:, t : t + 1].to(device) for name, x in inputs.items()}
        o, state = gated_delta_rule(
            **token, initial_state=state, output_final_state=True, backend="fla"
        )
        outputs.append(o)
    return {"o": rel_rms(torch.cat(outputs, 1), whole), "state": rel_rms(state, last)}


def naive_errors() -> Errors:
    """FLA's plain recurrence against our loop; `swapped` passes g and beta in the wrong order."""
    from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule

    inputs = make(T_OP, 16, 32)
    start = inputs.pop("initial_state")
    inputs |= {n: l2norm(inputs[n]) for n in "qk"}
    options = {"initial_state": start, "output_final_state": True}
    o, state = gated_delta_rule(**inputs, **options, backend="loop")
    q, k, v, g, beta = inputs.values()
    seen = naive_recurrent_gated_delta_rule(q, k, v, beta, g, **options)
    swapped = naive_recurrent_gated_delta_rule(q, k, v, g, beta, **options)
    return {
        "o": rel_rms(seen[0], o),
        "state": rel_rms(seen[1], state),
        "swapped": rel_rms(swapped[0], o),
    }


def mixers(use_gate: bool, device: str) -> tuple[GatedDeltaNet, torch.nn.Module]:
    """Our mixer, with weights that no initialisation has, and FLA's layer with its state dict."""
    import fla.layers

    torch.manual_seed(0)
    ours = GatedDeltaNet(48, 3, 16, 0, MixerForm(use_gate=use_gate, backend="loop"))
    with torch.no_grad():
        ours.o_norm.weight.uniform_(0.5, 2)
        ours.dt_bias.add_(2)
    theirs = fla.layers.GatedDeltaNet(
        hidden_size=48,
        head_dim=16,
        num_heads=3,
        expand_v=1,
        use_gate=use_gate,
        use_short_conv=False,
    ).to(device)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return ours, theirs


def mixer_eval_errors(use_gate: bool, device: str) -> Errors:
    """Without gradients: FLA's fused recurrence, unpadded and padded; `no_norm` is a control."""
    ours, theirs = mixers(use_gate, device)
    theirs.eval()
    x, mask = torch.randn(2, T_EVAL, 48), torch.ones(2, T_EVAL, dtype=torch.long)
    mask[0, :7], mask[1, -4:] = 0, 0
    with torch.no_grad():
        plain, padded = ours(x)[0], ours(x, attention_mask=mask)[0][mask.bool()]
        seen = theirs(x.to(device))[0]
        seen_padded = theirs(x.to(device), attention_mask=mask.to(device))[0][mask.bool()]
        ours.o_norm.weight.fill_(1)
        control = ours(x)[0]
    return {
        "plain": rel_rms(seen, plain),
        "padded": rel_rms(seen_padded, padded),
        "no_norm": rel_rms(seen, control),
    }


def mixer_train_errors(use_gate: bool, device: str) -> Errors:
    """With gradients: FLA's chunk kernel, and the gradient of the input and of every parameter."""
    ours, theirs = mixers(use_gate, device)
    theirs.train()
    found = []
    for module, where in ((ours, "cpu"), (theirs, device)):
        torch.manual_seed(1)
        x = torch.randn(2, T_TRAIN, 48).to(where).requires_grad_()
        y = module(x)[0]
        (y * torch.randn(y.shape).to(where)).sum().backward()
        found.append({"y": y, "dx": x.grad, **{n: p.grad for n, p in module.named_parameters()}})
    return {name: rel_rms(found[1][name], truth) for name, truth in found[0].items()}
