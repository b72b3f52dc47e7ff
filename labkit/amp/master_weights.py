"""fp32 master weights: a model in 16 bits, trained by an optimizer that keeps every weight in 32.

    model      w 16 bit --forward, backward--> g 16 bit
                    ^                              | take_gradients: to fp32
                    | rounded once a step          v
    optimizer  master 32 bit  <--  step  <--  g 32 bit (unscaled, clipped here)

Without them small steps are lost: bf16 has 8 significant bits, so w + d == w once |d| < |w| / 512.
Autocast needs none of this: there the parameters are the masters.

Bytes per rank for P parameters: 2 P (model) + 4 P (masters) + the optimizer's states in fp32;
gradients 2 P, then 4 P. Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.1.
"""

import weakref

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from labkit.pickle_support import NotPickled

MASTERS = WeakTensorKeyDictionary()  # parameter -> weak reference to its master


class MasterWeights(NotPickled, torch.optim.Optimizer):
    """An optimizer that updates fp32 copies of 16-bit parameters, the masters.

    params: parameters of any floating dtype, or groups of them. Each step sets 16-bit parameters to
        their rounded masters; other parameters are their own masters.
    optimizer_class(masters, **defaults): the optimizer to use. param_groups hold the masters:
        schedulers, clipping and labkit's GradScaler work on those.
    """

    def __init__(self, params, optimizer_class, **defaults):
        params = list(params)
        groups = params if params and isinstance(params[0], dict) else [{"params": params}]
        groups = [{**group, "params": list(group["params"])} for group in groups]
        self._models = [p for group in groups for p in group["params"]]
        for group in groups:
            group["params"] = [master_of(p) for p in group["params"]]
        self.optimizer = optimizer_class(groups, **defaults)
        self._masters = [
            master for group in self.optimizer.param_groups for master in group["params"]
        ]
        super().__init__(self.optimizer.param_groups, self.optimizer.defaults)
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state
        self._note_masters()

    def _note_masters(self):
        MASTERS.update((p, weakref.ref(master)) for p, master in self.pairs())

    def add_param_group(self, param_group):
        """Add a parameter group, as torch.optim.Optimizer does; 16-bit parameters get masters."""
        if self.param_groups is not self.optimizer.param_groups:  # while torch's class constructs
            return super().add_param_group(param_group)
        params = param_group["params"]
        params = [params] if isinstance(params, torch.Tensor) else list(params)
        if any(p is model for p in params for model in self._models):
            raise ValueError("some parameters appear in more than one parameter group")
        masters = [master_of(p) for p in params]
        self.optimizer.add_param_group({**param_group, "params": masters})
        self._models += params
        self._masters += masters
        self._note_masters()

    def pairs(self):
        """Return [(parameter, its master)] of the parameters that are not their own masters."""
        return [(p, m) for p, m in zip(self._models, self._masters, strict=True) if p is not m]

    @torch.no_grad()
    def take_gradients(self):
        """Move the gradients of 16-bit parameters to the masters, in fp32, replacing theirs.

        step() and GradScaler.unscale_() call it first. Call it before you read or clip the masters'
        gradients. If no 16-bit parameter has a gradient, it does nothing.
        """
        pairs = self.pairs()
        if any(p.grad is not None for p, _ in pairs):  # else moved already, perhaps unscaled
            for p, master in pairs:
                master.grad, p.grad = None if p.grad is None else p.grad.float(), None

    def clip_grad_norm_(self, max_norm, norm_type=2.0):
        """Clip the norm of the masters' gradients to max_norm; return the norm before, a scalar.

        Only for a model that is complete on this rank. Raises RuntimeError for FSDP's shards: call
        the model's clip_grad_norm_, which computes the norm over all ranks and uses the masters'
        gradients.
        """
        if any(hasattr(p, "is_piece") for p in self._models):
            raise RuntimeError(
                "MasterWeights has shards of FSDP, and only their own norm: call clip_grad_norm_ "
                "of the model"
            )
        self.take_gradients()
        return torch.nn.utils.clip_grad_norm_(self._masters, max_norm, norm_type)

    @torch.no_grad()
    def step(self, closure=None):
        """Step the masters, then set each parameter to its master, rounded to nearest.

        Raises RuntimeError for a closure.
        """
        if closure is not None:
            raise RuntimeError(
                "MasterWeights.step takes no closure: "
                "gradients must be moved to the masters in between"
            )
        self.take_gradients()
        self.optimizer.step()
        for p, master in self.pairs():
            p.copy_(master)
            master.grad = None

    def zero_grad(self, set_to_none=True):
        for p in (*self._models, *self._masters):
            if p.grad is not None:
                p.grad = None if set_to_none else p.grad.zero_()

    def state_dict(self):
        """Return the optimizer's state and "masters": the model's own weights are rounded."""
        return {
            **self.optimizer.state_dict(),
            "masters": [master.detach() for master in self._masters],
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict):
        """Load a state_dict() and set the parameters.

        Raises ValueError if the masters are missing or their shapes differ.
        """
        masters = state_dict.get("masters")
        if masters is None or [m.shape for m in masters] != [m.shape for m in self._masters]:
            raise ValueError(
                "not a state dict of MasterWeights over these parameters: its masters do not fit"
            )
        self.optimizer.load_state_dict(
            {key: value for key, value in state_dict.items() if key != "masters"}
        )
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state
        for master, saved in zip(self._masters, masters, strict=True):
            master.copy_(saved)
        for p, master in self.pairs():
            p.copy_(master)


def holder(p):
    """Return the tensor that has p's gradient: its master if MasterWeights has moved it, else p."""
    master = MASTERS[p]() if p.grad is None and p in MASTERS else None
    return p if master is None else master


def master_of(p):
    """Return an fp32 copy of a 16-bit parameter; any other parameter is its own master."""
    if p.dtype not in (torch.float16, torch.bfloat16):
        return p
    return torch.nn.Parameter(p.detach().float(), requires_grad=p.requires_grad)
