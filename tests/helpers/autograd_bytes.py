"""The bytes that autograd keeps for backward."""

import torch


def kept_bytes(module, x):
    """Bytes of what autograd keeps of a forward, each storage once, parameters left out."""
    kept, parameters = {}, {p.untyped_storage().data_ptr() for p in module.parameters()}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage  # held: an address that is freed comes again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        y = module(x)
    assert y.requires_grad
    return sum(storage.nbytes() for storage in kept.values())
