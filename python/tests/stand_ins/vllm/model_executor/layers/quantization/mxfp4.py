from .experts import ExpertsMethod


class GptOssMxfp4MoEMethod(ExpertsMethod):
    pass


class Mxfp4MoEMethod(ExpertsMethod):
    pass
