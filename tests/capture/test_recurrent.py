"""Recurrent layers are one operation each in a graph, whatever the length of the sequence."""

import pytest
import torch

from mtmc_lsp.capture.worker.passes.aten_aliases import canonical
from mtmc_lsp.capture.worker.passes.recurrent_layers import single_recurrent_operators

LAYERS = [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN]


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_a_layer_is_one_node_with_the_types_of_its_real_results(layer, batch_first, bidirectional):
    """The export holds one call, and what it says of shapes and strides is what the layer really gives."""
    module = layer(6, 5, 2, batch_first=batch_first, bidirectional=bidirectional).eval()
    x = torch.randn(4, 7, 6)
    with single_recurrent_operators(), torch.no_grad():
        program = torch.export.export(module, (x,), strict=False)
    called = [node for node in program.graph.nodes if "recurrent" in str(node.target)]
    assert len(called) == 1
    assert canonical(str(called[0].target)) in ("aten.lstm.input", "aten.gru.input", "aten.rnn_tanh.input")
    with torch.no_grad():
        real = module(x)
    real = [real[0], *(real[1] if isinstance(real[1], tuple) else [real[1]])]
    said = called[0].meta["val"]
    assert [(tuple(t.shape), t.stride()) for t in said] == [(tuple(t.shape), t.stride()) for t in real]


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_compute_the_same_inside_and_are_as_before_afterwards(layer):
    """Operators that stand for layers run them; leaving the context restores torch's own functions and lists of weights."""
    module = layer(3, 4).eval()
    x = torch.randn(5, 2, 3)
    with torch.no_grad():
        own, _ = module(x)
        with single_recurrent_operators():
            inside, _ = module(x)
        after, _ = module(x)
    assert torch.equal(own, inside) and torch.equal(own, after)
    assert "_flat_weights" not in vars(torch.nn.RNNBase)
    assert "lstm" not in vars(torch._VF)


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_in_training_without_dropout_is_one_node_too(layer):
    with single_recurrent_operators(), torch.no_grad():
        program = torch.export.export(layer(6, 5, 2), (torch.randn(4, 7, 6),), strict=False)
    assert len([node for node in program.graph.nodes if "recurrent" in str(node.target)]) == 1


def test_packed_sequences_and_dropout_run_as_they_are():
    """Neither has an operator: one has sizes of batches, the other draws random numbers."""
    layer = torch.nn.LSTM(3, 4, 2, dropout=0.5)
    packed = torch.nn.utils.rnn.pack_sequence([torch.randn(5, 3), torch.randn(2, 3)])
    with single_recurrent_operators(), torch.no_grad():
        result, _ = layer.eval()(packed)
        inside, _ = layer.train()(torch.randn(5, 2, 3))
    assert result.data.shape == (7, 4)
    assert inside.shape == (5, 2, 4)


def test_the_weights_are_those_that_a_call_is_made_with():
    """A call with other tensors in the place of the parameters uses them, though the layer keeps a list of its own."""
    layer = torch.nn.GRU(3, 4).eval()
    zeros = {name: torch.zeros_like(value) for name, value in layer.named_parameters()}
    with single_recurrent_operators(), torch.no_grad():
        result, _ = torch.func.functional_call(layer, zeros, (torch.randn(5, 2, 3),))
    assert torch.count_nonzero(result) == 0
