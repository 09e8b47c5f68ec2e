from .experts import ExpertsMethod


class AutoAWQMoEMethod(ExpertsMethod):
    input_dtype = None
