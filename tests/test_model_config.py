"""The sizes of MiniGPT and the flat order of its parameters."""

import math

import numpy as np
import pytest

from mpi_ckpt.model import MiniGPT, ModelConfig

ODD = ModelConfig(n_layer=3, n_embd=15, n_head=3, vocab_size=57, seq_len=7)


def test_the_default_model_has_30080_parameters_and_qkv_where_the_manifest_says():
    config = ModelConfig()
    assert config.num_params == 30080
    qkv = next(p for p in config.parameters() if p.name == "blocks.0.qkv.weight")
    assert (qkv.start, qkv.shape) == (2624, (96, 32))


@pytest.mark.parametrize("config", [ModelConfig(), ODD, ModelConfig(1, 1, 1, 1, 1)])
def test_parameters_follow_each_other_without_gap_and_have_distinct_names(config):
    parameters = config.parameters()
    assert parameters[0].start == 0
    assert [p.start for p in parameters[1:]] == [p.stop for p in parameters[:-1]]
    assert parameters[-1].stop == config.num_params == sum(math.prod(p.shape) for p in parameters)
    assert len({p.name for p in parameters}) == len(parameters) == 5 + 12 * config.n_layer


def test_weight_decay_applies_to_matrices_only():
    decays = {p.name for p in ODD.parameters() if p.decays}
    assert {"wte.weight", "wpe.weight", "head.weight", "blocks.2.fc.weight"} <= decays
    assert not any(name.endswith("bias") or ".ln" in name or name.startswith("ln_f") for name in decays)


@pytest.mark.parametrize("field", ["n_layer", "n_embd", "n_head", "vocab_size", "seq_len"])
@pytest.mark.parametrize("value", [0, -4, 2.0, True, "8", None])
def test_a_size_that_is_no_positive_integer_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=rf"^{field}: found {value!r}, expected an integer of at least 1$"):
        ModelConfig(**{field: value})


def test_a_width_that_heads_do_not_divide_is_refused_by_name():
    with pytest.raises(ValueError, match="n_embd: found 32, expected a multiple of n_head, which is 5"):
        ModelConfig(n_embd=32, n_head=5)


def test_initial_parameters_are_a_pure_function_of_config_and_seed():
    first, again = MiniGPT(ODD, 1).initial_parameters(7), MiniGPT(ODD, 4, np.float64).initial_parameters(7)
    assert first.dtype == np.float32
    assert first.shape == (ODD.num_params,)
    assert first.tobytes() == again.tobytes()
    assert first.tobytes() != MiniGPT(ODD, 1).initial_parameters(8).tobytes()


def test_initial_parameters_have_the_spread_of_gpt2():
    config = ModelConfig(n_layer=2, n_embd=128, n_head=4, vocab_size=256, seq_len=64)
    flat = MiniGPT(config, 0).initial_parameters(0)
    for p in config.parameters():
        values = flat[p.start : p.stop]
        if p.name.endswith("bias"):
            assert not values.any(), p.name
        elif len(p.shape) == 1:
            assert (values == 1).all(), p.name
        else:
            std = 0.02 / math.sqrt(4) if p.name.endswith("proj.weight") else 0.02
            assert abs(values.std() / std - 1) < 5 / math.sqrt(2 * p.size), p.name
            assert abs(values.mean()) < 5 * std / math.sqrt(p.size), p.name
