"""Each recurrent layer is a single node, whatever the length of the sequence."""

import pytest
import torch

from mtmc_lsp.capture.worker.passes.aten_aliases import canonical
from mtmc_lsp.capture.worker.passes.recurrent_layers import single_recurrent_operators

LAYERS = [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN]


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_a_layer_is_one_node_with_the_types_of_its_results(layer, batch_first, bidirectional):
    """The node has the shapes and strides of the layer's results in eager mode."""
    module = layer(6, 5, 2, batch_first=batch_first, bidirectional=bidirectional).eval()
    x = torch.randn(4, 7, 6)
    with single_recurrent_operators(), torch.no_grad():
        program = torch.export.export(module, (x,), strict=False)
    called = [node for node in program.graph.nodes if "recurrent" in str(node.target)]
    assert len(called) == 1
    assert canonical(str(called[0].target)) in ("aten.lstm.input", "aten.gru.input", "aten.rnn_tanh.input")
    with torch.no_grad():
        expected = module(x)
    expected = [expected[0], *(expected[1] if isinstance(expected[1], tuple) else [expected[1]])]
    traced = called[0].meta["val"]
    assert [(tuple(t.shape), t.stride()) for t in traced] == [(tuple(t.shape), t.stride()) for t in expected]


@pytest.mark.parametrize("layer", LAYERS)
def test_results_are_equal_inside_and_after_the_context(layer):
    """Leaving the context restores torch's functions and weight lists."""
    module = layer(3, 4).eval()
    x = torch.randn(5, 2, 3)
    with torch.no_grad():
        before, _ = module(x)
        with single_recurrent_operators():
            inside, _ = module(x)
        after, _ = module(x)
    assert torch.equal(before, inside) and torch.equal(before, after)
    assert "_flat_weights" not in vars(torch.nn.RNNBase)
    assert "lstm" not in vars(torch._VF)


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_in_training_without_dropout_is_one_node_too(layer):
    with single_recurrent_operators(), torch.no_grad():
        program = torch.export.export(layer(6, 5, 2), (torch.randn(4, 7, 6),), strict=False)
    assert len([node for node in program.graph.nodes if "recurrent" in str(node.target)]) == 1


def test_packed_sequences_and_dropout_run_unchanged():
    """They have no operator: packed sequences have batch sizes, and dropout draws random numbers."""
    layer = torch.nn.LSTM(3, 4, 2, dropout=0.5)
    packed = torch.nn.utils.rnn.pack_sequence([torch.randn(5, 3), torch.randn(2, 3)])
    with single_recurrent_operators(), torch.no_grad():
        result, _ = layer.eval()(packed)
        inside, _ = layer.train()(torch.randn(5, 2, 3))
    assert result.data.shape == (7, 4)
    assert inside.shape == (5, 2, 4)


def test_a_functional_call_uses_the_substituted_weights():
    """The layer's cached list of weights must not be used instead."""
    layer = torch.nn.GRU(3, 4).eval()
    zeros = {name: torch.zeros_like(value) for name, value in layer.named_parameters()}
    with single_recurrent_operators(), torch.no_grad():
        result, _ = torch.func.functional_call(layer, zeros, (torch.randn(5, 2, 3),))
    assert torch.count_nonzero(result) == 0
