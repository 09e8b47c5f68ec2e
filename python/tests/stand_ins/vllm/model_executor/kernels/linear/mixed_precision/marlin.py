from .MPLinearKernel import MPLinearKernel


class MarlinLinearKernel(MPLinearKernel):
    pass
