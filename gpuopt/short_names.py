"""The optimizers, without "Optimizer" in their names."""

from gpuopt import optimizers as _all

AdaBelief = _all.AdaBeliefOptimizer
Adadelta = _all.AdadeltaOptimizer
AdagradDA = _all.AdagradDAOptimizer
Adagrad = _all.AdagradOptimizer
AdaMax = _all.AdaMaxOptimizer
Adam = _all.AdamOptimizer
AdamW = _all.AdamWOptimizer
AddSign = _all.AddSignOptimizer
AMSGrad = _all.AMSGradOptimizer
Ftrl = _all.FtrlOptimizer
GradientDescent = _all.GradientDescentOptimizer
LAMB = _all.LAMBOptimizer
LARS = _all.LARSOptimizer
LazyAdam = _all.LazyAdamOptimizer
Lion = _all.LionOptimizer
Momentum = _all.MomentumOptimizer
MomentumW = _all.MomentumWOptimizer
Nadam = _all.NadamOptimizer
PartialRowWiseAdam = _all.PartialRowWiseAdamOptimizer
PowerSign = _all.PowerSignOptimizer
ProximalAdagrad = _all.ProximalAdagradOptimizer
ProximalGradientDescent = _all.ProximalGradientDescentOptimizer
RAdam = _all.RAdamOptimizer
RegAdagrad = _all.RegAdagradOptimizer
RMSProp = _all.RMSPropOptimizer
RowWiseAdagrad = _all.RowWiseAdagradOptimizer
ScheduleFreeAdamW = _all.ScheduleFreeAdamWOptimizer
ScheduleFreeSGD = _all.ScheduleFreeSGDOptimizer
TorchAdagrad = _all.TorchAdagradOptimizer
TorchAdamW = _all.TorchAdamWOptimizer
TorchNAdam = _all.TorchNAdamOptimizer
TorchRMSprop = _all.TorchRMSpropOptimizer
TorchSGD = _all.TorchSGDOptimizer
