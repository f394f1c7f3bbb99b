"""The optimizers, one module each. A line here is all that exports one."""

from typing import TYPE_CHECKING

from gpuopt.optimizers.ada_belief import AdaBeliefOptimizer as AdaBeliefOptimizer
from gpuopt.optimizers.ada_max import AdaMaxOptimizer as AdaMaxOptimizer
from gpuopt.optimizers.adadelta import AdadeltaOptimizer as AdadeltaOptimizer
from gpuopt.optimizers.adagrad import AdagradOptimizer as AdagradOptimizer
from gpuopt.optimizers.adagrad_da import AdagradDAOptimizer as AdagradDAOptimizer
from gpuopt.optimizers.adam import AdamOptimizer as AdamOptimizer
from gpuopt.optimizers.adam_w import AdamWOptimizer as AdamWOptimizer
from gpuopt.optimizers.add_sign import AddSignOptimizer as AddSignOptimizer
from gpuopt.optimizers.ams_grad import AMSGradOptimizer as AMSGradOptimizer
from gpuopt.optimizers.ftrl import FtrlOptimizer as FtrlOptimizer
from gpuopt.optimizers.gradient_descent import GradientDescentOptimizer as GradientDescentOptimizer
from gpuopt.optimizers.lamb import LAMBOptimizer as LAMBOptimizer
from gpuopt.optimizers.lars import LARSOptimizer as LARSOptimizer
from gpuopt.optimizers.lazy_adam import LazyAdamOptimizer as LazyAdamOptimizer
from gpuopt.optimizers.lion import LionOptimizer as LionOptimizer
from gpuopt.optimizers.momentum import MomentumOptimizer as MomentumOptimizer
from gpuopt.optimizers.momentum_w import MomentumWOptimizer as MomentumWOptimizer
from gpuopt.optimizers.nadam import NadamOptimizer as NadamOptimizer
from gpuopt.optimizers.partial_row_wise_adam import (
    PartialRowWiseAdamOptimizer as PartialRowWiseAdamOptimizer,
)
from gpuopt.optimizers.power_sign import PowerSignOptimizer as PowerSignOptimizer
from gpuopt.optimizers.proximal_adagrad import ProximalAdagradOptimizer as ProximalAdagradOptimizer
from gpuopt.optimizers.proximal_gradient_descent import (
    ProximalGradientDescentOptimizer as ProximalGradientDescentOptimizer,
)
from gpuopt.optimizers.r_adam import RAdamOptimizer as RAdamOptimizer
from gpuopt.optimizers.reg_adagrad import RegAdagradOptimizer as RegAdagradOptimizer
from gpuopt.optimizers.rms_prop import RMSPropOptimizer as RMSPropOptimizer
from gpuopt.optimizers.row_wise_adagrad import RowWiseAdagradOptimizer as RowWiseAdagradOptimizer
from gpuopt.optimizers.schedule_free_adam_w import (
    ScheduleFreeAdamWOptimizer as ScheduleFreeAdamWOptimizer,
)
from gpuopt.optimizers.schedule_free_sgd import ScheduleFreeSGDOptimizer as ScheduleFreeSGDOptimizer
from gpuopt.optimizers.torch_adagrad import TorchAdagradOptimizer as TorchAdagradOptimizer
from gpuopt.optimizers.torch_adam_w import TorchAdamWOptimizer as TorchAdamWOptimizer
from gpuopt.optimizers.torch_nadam import TorchNAdamOptimizer as TorchNAdamOptimizer
from gpuopt.optimizers.torch_rms_prop import TorchRMSpropOptimizer as TorchRMSpropOptimizer
from gpuopt.optimizers.torch_sgd import TorchSGDOptimizer as TorchSGDOptimizer

# Type checkers cannot evaluate this line; they read the imports above.
if not TYPE_CHECKING:
    __all__ = [name for name in globals() if name.endswith("Optimizer")]
