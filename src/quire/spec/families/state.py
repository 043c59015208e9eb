"""Recurrent layers: Mamba 1 and 2, gated delta net, Kimi delta attention, lightning attention, short convolutions.

Shapes follow the layers' definitions: a convolution of kernel k needs the last k - 1 inputs of its channels.
"""

from __future__ import annotations

from collections.abc import Mapping

from quire.spec.config_reader import HIDDEN_SIZE, NUM_HEADS, ConfigReader
from quire.spec.layers import StateCall
from quire.spec.layout import DType


def read(config: ConfigReader) -> tuple[str, StateCall]:
    """The name of this model's recurrence in `RECURRENCES`, and the stored data of one recurrent layer.

    Raises UnsupportedModel if the configuration describes no known recurrence.
    """
    dtype = recurrence_dtype(config)
    for name, rule in RECURRENCES:
        found = rule(config, dtype)
        if found is not None:
            return name, found
    raise config.missing(
        "mamba_num_heads", "linear_num_value_heads", "linear_attn_config", "mamba_d_state", "conv_L_cache"
    )


def recurrence_dtype(config: ConfigReader) -> DType:
    """The element type of the recurrences' state in the configuration, by default float32."""
    return config.dtype("mamba_ssm_cache_dtype", "mamba_ssm_dtype", default=DType.FLOAT32)


def _delta_net(config: ConfigReader, dtype: DType) -> StateCall | None:
    """Gated delta net: queries and keys per key head, values per value head, a matrix per value head."""
    if not config.has("linear_num_value_heads"):
        return None
    key_dim, value_dim = config.size("linear_key_head_dim"), config.size("linear_value_head_dim")
    value_heads = config.size("linear_num_value_heads")
    return StateCall(
        kernel=config.size("linear_conv_kernel_dim"),
        channels=value_heads * value_dim,
        groups=config.size("linear_num_key_heads"),
        group_channels=2 * key_dim,
        heads=value_heads,
        matrix=(key_dim, value_dim),
        state_dtype=dtype,
    )


def _kimi_delta(config: ConfigReader, dtype: DType) -> StateCall | None:
    """Kimi delta attention: a convolution each for queries, keys and values."""
    nested = config.get("linear_attn_config")
    source = nested if isinstance(nested, Mapping) else config.text
    names = ("num_heads", "head_dim", "short_conv_kernel_size")
    if source is config.text:
        names = ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
        if config.kind == "bailing_hybrid":
            config.ignore("short_conv_kernel_size")  # another name of the kernel, if transformers writes both
            if not config.has(*names):
                names = ("num_attention_heads", "head_dim", "short_conv_kernel_size")
    heads, dim, kernel = (source.get(name) for name in names)
    if not heads:
        return None
    if not isinstance(heads, int) or not isinstance(dim, int) or not isinstance(kernel, int):
        raise config.missing(*(f"linear_attn_config.{name}" for name in names))
    config.ignore("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")  # flat names of the same numbers
    return StateCall(kernel=kernel, channels=3 * heads * dim, heads=heads, matrix=(dim, dim), state_dtype=dtype)


def _mamba2(config: ConfigReader, dtype: DType) -> StateCall | None:
    """Mamba 2: B and C per group beside the inner channels, a matrix per head."""
    if config.kind == "zamba":  # Mamba 1 in heads
        return None
    heads = config.size("mamba_num_heads", "mamba_n_heads", "n_mamba_heads", default=0)
    if not heads and config.kind == "mamba2":
        heads = config.size("num_heads")
    if not heads:
        return None
    expanded = int(config.number("mamba_expand", "expand", default=2) * config.size(*HIDDEN_SIZE))
    inner = config.size("mamba_d_ssm", default=expanded)
    head_dim = config.size("mamba_head_dim", "mamba_d_head", "mamba_headdim", default=0)
    if not head_dim:
        head_dim = config.size("head_dim") if config.kind == "mamba2" else inner // heads
    state_size = config.size("ssm_state_size", "mamba_d_state", "state_size")
    return StateCall(
        kernel=config.size("mamba_d_conv", "conv_kernel"),
        channels=heads * head_dim,
        groups=config.size("n_groups", "mamba_n_groups", "mamba_ngroups"),
        group_channels=2 * state_size,
        heads=heads,
        matrix=(head_dim, state_size),
        state_dtype=dtype,
    )


def _mamba1(config: ConfigReader, dtype: DType) -> StateCall | None:
    """Mamba 1: every inner channel is a head of its own, except in Zamba, which splits its channels into a few."""
    if not config.has("mamba_d_state", "state_size"):
        return None
    hidden = config.size(*HIDDEN_SIZE)
    inner = int(config.number("mamba_expand", "expand", default=2) * hidden)
    if config.kind in ("mamba", "falcon_mamba"):
        inner = config.size("intermediate_size", default=inner)
    size = config.size("mamba_d_state", "state_size")
    heads = config.size("n_mamba_heads", default=2) if config.kind == "zamba" else inner
    return StateCall(
        kernel=config.size("mamba_d_conv", "conv_kernel"),
        channels=inner,
        heads=heads,
        matrix=(inner // heads, size) if config.kind == "zamba" else (size,),
        state_dtype=dtype,
    )


def _short_conv(config: ConfigReader, dtype: DType) -> StateCall | None:
    """A gated short convolution over the hidden channels."""
    if not config.has("conv_L_cache"):
        return None
    return StateCall(kernel=config.size("conv_L_cache"), channels=config.size(*HIDDEN_SIZE))


def _linear_recurrent_unit(config: ConfigReader, dtype: DType) -> StateCall | None:
    """RecurrentGemma: one number per channel of the recurrence, and a convolution before it."""
    if not config.has("lru_width"):
        return None
    width = config.size("lru_width")
    return StateCall(
        kernel=config.size("conv1d_width", default=4), channels=width, heads=width, matrix=(1,), state_dtype=dtype
    )


def _lightning(config: ConfigReader, dtype: DType) -> StateCall | None:
    """Lightning attention: a square matrix per head, without a convolution."""
    if not config.kind.startswith("minimax"):
        return None
    heads = config.size(*NUM_HEADS)
    dim = config.size("head_dim", default=config.size(*HIDDEN_SIZE) // heads)
    return StateCall(heads=heads, matrix=(dim, dim), state_dtype=dtype)


RECURRENCES = (
    ("delta", _delta_net),
    ("kda", _kimi_delta),
    ("mamba2", _mamba2),
    ("mamba", _mamba1),
    ("conv", _short_conv),
    ("lru", _linear_recurrent_unit),
    ("lightning", _lightning),
)
"""Names and readers of recurrences; the first that finds its fields decides."""
