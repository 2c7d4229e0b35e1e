"""Bytes of the tensors that are alive. Not a test."""

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """Counts the bytes of these tensors, and of those that operations in this context return, while they are alive.

    Attributes:
        most: most bytes after any operation.
    """

    def __init__(self, tensors):
        super().__init__()
        self._storages = {}
        self._add(tensors)
        self.most = self.now()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        if not getattr(func, "is_view", False):
            self._add(each for each in tree_leaves(output) if isinstance(each, Tensor) and each is not args[0])
            self.most = max(self.most, self.now())
        return output

    def _add(self, tensors):
        for storage in (each.untyped_storage() for each in tensors):
            self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()

    def now(self):
        """Return the bytes that are alive."""
        self._storages = {key: each for key, each in self._storages.items() if not each[0].expired()}
        return sum(size for _, size in self._storages.values())
