"""Moves the state of a training run from torch.optim to gpuopt, and back.

Where both libraries compute the same formula, the next steps agree to float32 rounding:

| torch.optim | gpuopt | agree |
|---|---|---|
| Adam | AdamOptimizer | from torch, and back to torch: always; else to torch: at epsilon 0 |
| AdamW | TorchAdamWOptimizer; without decay AdamOptimizer | always; without decay as Adam |
| Adam with amsgrad | AMSGradOptimizer, of the form "torch" | always |
| NAdam, RAdam | TorchNAdamOptimizer, RAdamOptimizer | without weight decay |
| SGD | GradientDescentOptimizer, MomentumOptimizer, TorchSGDOptimizer | always |
| Adagrad | AdagradOptimizer | where epsilon is lost in rounding beside the accumulators |
| RMSprop | RMSPropOptimizer | at epsilon 0: torch adds it outside the root |

Other weight decay, AdamW with amsgrad, maximize and lr_decay are refused.

States of bitsandbytes' AdamW8bit, Lion8bit and SGD8bit become those of TorchAdamW, Lion and
Momentum with slots in 8 bits, and the other way, code by code.

`variables_of_module` and `gradients_of_module` let gpuopt update the parameters of a torch module.
"""

from gpuopt.interop.bitsandbytes import optimizer_from_bitsandbytes, optimizer_to_bitsandbytes
from gpuopt.interop.from_torch import optimizer_from_torch
from gpuopt.interop.to_torch import optimizer_to_torch
from gpuopt.interop.torch_modules import gradients_of_module, variables_of_module

__all__ = [
    "gradients_of_module",
    "optimizer_from_bitsandbytes",
    "optimizer_from_torch",
    "optimizer_to_bitsandbytes",
    "optimizer_to_torch",
    "variables_of_module",
]
