"""The hybrid student: the teacher's own model class with some attention modules swapped.

For each supported teacher architecture there is a config class (`model_type`
`gdn_hybrid_<teacher>`) and a model class, registered with `transformers`' Auto classes. A config
says in `gdn` which layers are converted and in which form; everything else is the teacher's.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import copy_, no_init_weights, ones_
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from tc.student.mixer import GatedDeltaNet, HeadNorm, MixerForm
from tc.teacher.convertible import SUPPORTED

PREFIX = "gdn_hybrid_"

FLOAT32 = frozenset({"A_log", "dt_bias"})
"""Parameters that stay in float32: long half-lives need more digits than bfloat16 has."""


class HybridMixin:
    """Makes a causal LM of `transformers` a hybrid: swaps the attention that its config names.

    Comes before a teacher's class among the bases, which has `model` and `config`.
    """

    model: Any
    config: Any

    _keep_in_fp32_modules_strict = FLOAT32
    # A server that brings its own attention and its own cache would leave the mixers without state.
    _supports_attention_backend = False

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        form = MixerForm(**config.gdn["form"])
        for i in config.gdn["layers"]:
            self.model.layers[i].self_attn = make_mixer(config, i, form)

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """What `transformers` calls for weights that no file had; what was loaded stays.

        It knows no mixers, and would leave these with whatever the memory held. Its functions that
        fill a tensor pass over what was loaded, so ours must be those.
        """
        super().initialize_weights()  # type: ignore[misc]
        for module in self.modules():  # type: ignore[attr-defined]
            if isinstance(module, HeadNorm):
                ones_(module.weight)
            elif isinstance(module, GatedDeltaNet):
                for parameter, value in module.fresh_dynamics():
                    copy_(parameter, value)

    def init_continuous_batching(self, *args: object, **kwargs: object) -> Any:
        """Refuses what `generate_batch` and `cache_implementation="paged"` begin with.

        Raises:
            ValueError: always. A paged cache has keys and values in blocks and no place for a
                state, and it would fail in a thread of its own.
        """
        raise ValueError(
            "continuous batching (generate_batch, cache_implementation='paged') has no place for "
            "the recurrent state of a Gated DeltaNet layer: take generate() on a padded batch"
        )

    @property
    def mixers(self) -> dict[int, GatedDeltaNet]:
        """The converted layers' mixers by layer index."""
        return {i: self.model.layers[i].self_attn for i in self.config.gdn["layers"]}


def make_mixer(config: Any, layer_idx: int, form: MixerForm) -> GatedDeltaNet:
    """A fresh mixer of a teacher's sizes."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return GatedDeltaNet(config.hidden_size, config.num_attention_heads, head_dim, layer_idx, form)


def _register(model_type: str) -> tuple[Any, Any]:
    """Makes and registers the hybrid classes of one teacher architecture."""
    teacher_config = CONFIG_MAPPING[model_type]
    teacher_model = MODEL_FOR_CAUSAL_LM_MAPPING[teacher_config]
    stem = f"GDNHybrid{teacher_model.__name__.removesuffix('ForCausalLM')}"
    space = {"__module__": __name__}
    config = type(f"{stem}Config", (teacher_config,), {**space, "model_type": PREFIX + model_type})
    model = type(
        f"{stem}ForCausalLM", (HybridMixin, teacher_model), {**space, "config_class": config}
    )
    AutoConfig.register(PREFIX + model_type, config, exist_ok=True)
    AutoModelForCausalLM.register(config, model, exist_ok=True)
    # Pickle and `save_pretrained` look classes up by name in their module.
    globals()[config.__name__], globals()[model.__name__] = config, model
    return config, model


CLASSES = {model_type: _register(model_type) for model_type in SUPPORTED}
"""Config and model class by the teacher's model type."""


def build_student(
    teacher: PreTrainedModel, mixers: dict[int, GatedDeltaNet], provenance: dict[str, Any]
) -> PreTrainedModel:
    """Puts mixers into a copy of a teacher; kept parts share the teacher's memory.

    Args:
        teacher: a supported causal LM.
        mixers: the mixer of each converted layer; they become the student's own, in the teacher's
            dtype.
        provenance: what the student was made from, kept in its config.

    Returns:
        A student in evaluation mode, every kept weight bit-identical to the teacher's.
    """
    config_class, model_class = CLASSES[teacher.config.model_type]
    facts = {k: v for k, v in teacher.config.to_dict().items() if k != "model_type"}
    form = next(iter(mixers.values())).form if mixers else MixerForm()
    gdn = {"layers": sorted(mixers), "form": form.to_dict(), "provenance": provenance}
    config = config_class.from_dict({**facts, "architectures": [model_class.__name__], "gdn": gdn})
    config._attn_implementation = teacher.config._attn_implementation
    with no_init_weights():
        student = model_class(config)
    for i, mixer in mixers.items():
        student.model.layers[i].self_attn = cast(mixer, teacher.dtype)
    converted = tuple(f"model.layers.{i}.self_attn." for i in mixers)
    kept = {k: v for k, v in teacher.state_dict().items() if not k.startswith(converted)}
    missing = student.load_state_dict(kept, strict=False, assign=True).missing_keys
    assert all(key.startswith(converted) for key in missing), missing
    student.tie_weights()
    for parameter in student.parameters():  # else `init_weights` would draw all of them anew
        parameter._is_hf_initialized = True
    if teacher.can_generate():
        student.generation_config = teacher.generation_config
    return student.eval().requires_grad_(False)


@torch.no_grad()
def cast(mixer: GatedDeltaNet, dtype: torch.dtype) -> GatedDeltaNet:
    """Casts a mixer's parameters in place, but for those of `FLOAT32`."""
    for name, parameter in mixer.named_parameters():
        if name not in FLOAT32:
            parameter.data = parameter.data.to(dtype)
    return mixer
