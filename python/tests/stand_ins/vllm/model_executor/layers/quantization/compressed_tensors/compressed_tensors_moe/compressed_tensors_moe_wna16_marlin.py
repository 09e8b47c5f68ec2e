from vllm.model_executor.layers.quantization.experts import ExpertsMethod


class CompressedTensorsWNA16MarlinMoEMethod(ExpertsMethod):
    marlin_input_dtype, actorder = None, None
