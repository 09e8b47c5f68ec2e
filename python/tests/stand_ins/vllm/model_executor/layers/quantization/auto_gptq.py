from .experts import ExpertsMethod


class AutoGPTQMoEMethod(ExpertsMethod):
    input_dtype = None
