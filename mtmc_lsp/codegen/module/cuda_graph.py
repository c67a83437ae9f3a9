"""The function by which generated code replays its launches as one CUDA graph; what checks candidates knows its exact text.

CUDA graphs launch all of a call's kernels at once (CUDA C++ Programming Guide, 3.2.8.7). A graph reads and writes fixed
addresses: so a call's arguments are copied in and its results out, and a graph is captured anew for other shapes or parameters.
"""

from __future__ import annotations

MOST_GRAPHS = 4
"""Graphs that a file keeps, each with the memory of its intermediate values; a capture beyond them drops the oldest."""

GRAPHS = "from threading import Lock\n\n_GRAPHS, _CAPTURING = {}, Lock()\n"

REPLAYED = f'''def _replayed(launch, given, held, changed=()):
    """``launch(*given, *held)`` as one CUDA graph on copies of ``given``; its results are copies of the graph's own.

    A graph is captured for each layout of ``given``, addresses of ``held`` (parameters are read where they lie), GPU and stream.
    While a call uses a graph no other call finds it, and one at a time is captured. ``changed`` are the places in ``held`` of
    tensors that a launch writes into.
    """
    if torch.cuda.is_current_stream_capturing():
        return launch(*given, *held)
    stream = torch.cuda.current_stream()
    layouts = [(t.shape, t.stride(), t.dtype) for t in given]
    key = (launch, stream, *layouts, *[t.data_ptr() for t in held])
    found = _GRAPHS.pop(key, None)
    if found is None:
        if any(held[i].is_inference() for i in changed):
            return launch(*given, *held)  # these cannot be written into where a graph is captured
        for oldest in list(_GRAPHS)[: max(0, len(_GRAPHS) - {MOST_GRAPHS - 1})]:
            _GRAPHS.pop(oldest, None)
        with _CAPTURING, torch.inference_mode(False), torch.no_grad():
            inputs = [t.clone() for t in given]
            # A first run compiles the kernels and lets the libraries make ready; neither can be captured. It changes copies.
            side = torch.cuda.Stream()
            side.wait_stream(stream)
            with torch.cuda.stream(side):
                launch(*inputs, *[t.clone() if i in changed else t for i, t in enumerate(held)])
            stream.wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                results = launch(*inputs, *held)
        found = graph, inputs, results
    graph, inputs, results = found
    for own, theirs in zip(inputs, given):
        own.copy_(theirs)
    graph.replay()
    copies = results.clone() if isinstance(results, torch.Tensor) else tuple(t.clone() for t in results)
    _GRAPHS[key] = found
    return copies
'''


def without_replay(source: str) -> str:
    """A text without that function, whose text is known to be safe; lines keep their numbers."""
    for known in (GRAPHS, REPLAYED):
        source = source.replace(known, "\n" * known.count("\n"))
    return source
