from .MPLinearKernel import MPLinearKernel


class MacheteLinearKernel(MPLinearKernel):
    pass
