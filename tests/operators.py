"""Which operators of torch's a computation is made of."""

from torch.utils._python_dispatch import TorchDispatchMode


class Operators(TorchDispatchMode):
    """Scope that notes the names of torch's operators."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(str(function).split(".")[1])
        return function(*args, **(kwargs or {}))
