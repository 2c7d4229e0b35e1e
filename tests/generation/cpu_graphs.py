"""CUDA graphs on a CPU: a graph that records the operations of a capture, and repeats exactly these. Not a test.

As on a GPU, a capture changes no tensor that was there before, and a replay runs with the tensors, shapes and numbers
of the capture: what the host would have computed anew is as it was then.
"""

import contextlib

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Recorder(TorchDispatchMode):
    """Records operations; those that write to a tensor do nothing yet."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        with self:  # in inference mode, composite operations come here whole
            if (parts := func.decompose(*args, **kwargs)) is not NotImplemented:
                return parts
        arguments = {each.name: value for each, value in zip(func._schema.arguments, args, strict=False)} | kwargs
        written = [
            arguments[each.name]
            for each in func._schema.arguments
            if each.alias_info is not None and each.alias_info.is_write
        ]
        output = written[0] if written else func(*args, **kwargs)
        self.operations.append((func, args, kwargs, output))
        return output


class CPUGraph:
    """What the decoder uses of `torch.cuda.CUDAGraph`."""

    def __init__(self, captured):
        self._captured, self._pool, self._recorder, self.replays = captured, object(), Recorder(), 0

    def pool(self):
        return self._pool

    def capture_begin(self, pool, *, capture_error_mode):
        assert pool is None or any(each._pool is pool for each in self._captured), "the memory of no graph"
        assert capture_error_mode == "thread_local", "other threads use the GPU meanwhile"
        self._pool = pool or self._pool
        self._recorder.__enter__()

    def capture_end(self):
        self._recorder.__exit__(None, None, None)
        self._captured.append(self)

    def replay(self):
        self.replays += 1
        for func, args, kwargs, output in self._recorder.operations:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(output), tree_leaves(again), strict=True):
                if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                    old.copy_(new)


def on_the_cpu(monkeypatch):
    """Let CUDA graphs run on the CPU, with the operations of a GPU, and return the list of those that are captured."""
    monkeypatch.setattr("gym_rm.generation.decoding.can_pack_layers", lambda model: False)
    captured = []
    monkeypatch.setattr("torch.cuda.CUDAGraph", lambda: CPUGraph(captured))
    monkeypatch.setattr("torch.cuda.stream", contextlib.nullcontext)
    monkeypatch.setattr("gym_rm.generation.decoding._capture_stream", lambda device: None)
    return captured
