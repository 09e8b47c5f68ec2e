"""The cores of vLLM's layers of linear attention by fftune's ops: a convolution and a recurrence between the
projections, over vLLM's caches of states, by its indices.

A core says what a call of vLLM's has, which sequences the batch has, and which ops run them.
"""
import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from .. import ops  # noqa: F401: declares the ops
from .._declare import Into
from .logs import Unfit

NULL = 0  # vLLM's block that is no sequence's
_WIDTHS = range(2, 9)
_FEATURES = 256  # of a head or of a state, at most


@dataclass
class Layer:
    """A layer of vLLM's that a core computes."""

    module: nn.Module
    channels: int              # of the convolution
    state: tuple[int, ...]     # the shape of a sequence's
    words: str
    # Parameters in float32, as the kernels read them; by name. See refresh().
    wide: dict[str, Tensor] = field(default_factory=dict)

    def refresh(self) -> None:
        """Takes over parameters that vLLM may have loaded again."""
        for own, parameter in self.loaded():
            own.copy_(parameter)

    def loaded(self) -> list[tuple[Tensor, Tensor]]:
        """Those that are copies, each with vLLM's."""
        parameters = {name: getattr(self.module, name) for name in self.wide}
        return [(own, parameters[name].detach()) for name, own in self.wide.items() if own is not parameters[name]]

    @property
    def taps(self) -> Tensor:
        weight = self.module.conv1d.weight.detach()
        return weight.view(weight.shape[0], weight.shape[-1])


@dataclass
class States:
    """vLLM's caches of a layer."""

    inputs: Tensor   # of the convolution: [blocks, entries, channels], or [blocks, channels, entries]
    history: Tensor  # the part of them that a batch without drafts reads and writes
    order: str       # of a state of the convolution, in the op's words
    states: Tensor   # [blocks, heads, features of a value, features of a key]


@dataclass(frozen=True)
class Given:
    """A call of vLLM's: its arguments, and what the ops read and write of them."""

    arguments: dict[str, Tensor]
    x: Tensor                 # [tokens, channels], the convolution's inputs
    steps: tuple[Tensor, ...]  # [tokens, heads]: gates of the tokens
    out: Tensor               # [tokens, heads, features]


@dataclass
class Batch:
    """Sequences with one new token each, then those with several; or sequences whose drafts are verified. Indices of at
    most NULL are padding."""

    rows: int      # tokens of all
    decoding: int  # of sequences with one token
    indices: Tensor                # of all sequences; with `accepted` [sequences, slots], one behind each token
    offsets: Tensor | None = None  # of all; None where each has one token
    has_state: Tensor | None = None
    # The same of the sequences behind the first `decoding`, from their first token on.
    prompt_indices: Tensor | None = None
    prompt_offsets: Tensor | None = None
    prompt_has_state: Tensor | None = None
    accepted: Tensor | None = None  # the tokens of the last step that were kept

    @property
    def slots(self) -> int:
        """Tokens of a sequence whose drafts are verified, at most; 0 in other batches."""
        return 0 if self.accepted is None else self.indices.shape[1]

    @property
    def sizes(self) -> tuple[int, ...]:
        prompts = 0 if self.prompt_indices is None else len(self.prompt_indices)
        return self.rows, self.decoding, len(self.indices), prompts, self.slots

    def padded(self) -> "Batch":
        """The same sizes, and no sequence."""
        null = lambda indices: None if indices is None else torch.full_like(indices, NULL)
        return Batch(self.rows, self.decoding, null(self.indices), self.offsets, self.has_state,
                     null(self.prompt_indices), self.prompt_offsets, self.prompt_has_state, self.accepted)


class Core:
    """The core of one of vLLM's classes."""

    method: str                  # of the class
    op: str                      # the recurrence
    written: str                 # the argument that has the results
    metadata: tuple[str, ...]    # what is read of vLLM's
    needs: tuple[str, ...] = ()  # switches of vLLM's that times depend on

    def layer_of(self, module: nn.Module) -> Layer:
        """Unfit if the ops compute something else."""
        raise NotImplementedError

    def given(self, layer: Layer, arguments: dict[str, Tensor]) -> Given:
        raise NotImplementedError

    def batch_of(self, module: nn.Module, metadata) -> Batch | None:
        """None for a batch that the ops do not serve."""
        raise NotImplementedError

    def metadata_of(self, prototype, batch: Batch):
        """vLLM's metadata for one token of each sequence, or as many as each has slots."""
        raise NotImplementedError

    def rule(self, layer: Layer, states: Tensor, y: Tensor, steps: tuple[Tensor, ...], out: Tensor, indices: Tensor,
             has_state: Tensor | None, offsets: Tensor | None, accepted: Tensor | None) -> Into:
        """The recurrence of y, the convolution's results: [.., tokens, channels]."""
        raise NotImplementedError

    # Shared by all cores.

    def expect_metadata(self, metadata) -> None:
        missing = [name for name in self.metadata if not hasattr(metadata, name)]
        if missing:
            raise Unfit(f"the metadata of this vLLM has no {' and no '.join(missing)}")

    def copied(self, layer: Layer, given: Given) -> Given:
        """The same with tensors of its own: vLLM's convolution of one token writes over its input."""
        def like(tensor: Tensor) -> Tensor:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
            return made.copy_(tensor)

        return self.given(layer, {name: torch.zeros_like(value) if name == self.written else like(value)
                                  for name, value in given.arguments.items()})

    def apart(self, layer: Layer, given: Given) -> Given:
        """The same with results of its own."""
        return self.given(layer, given.arguments | {self.written: torch.zeros_like(given.arguments[self.written])})

    def drawn(self, layer: Layer, given: Given, rows: int, generator: torch.Generator) -> Given:
        """A call for so many random tokens."""
        def like(name: str, tensor: Tensor) -> Tensor:
            shape = rows, *tensor.shape[1:]
            if name == self.written:
                return tensor.new_zeros(shape)
            return torch.randn(shape, device=tensor.device, generator=generator).to(tensor.dtype)

        return self.given(layer, {name: like(name, value) for name, value in given.arguments.items()})

    def runs_of(self, layer: Layer, own: States, given: Given, batch: Batch) -> list[Into]:
        """The ops of a batch, in their order."""
        rows, decoding = batch.rows, batch.decoding
        bias = getattr(layer.module.conv1d, "bias", None)
        y = given.x.new_empty(rows, layer.channels)

        def convolution(x: Tensor, y: Tensor) -> Into:
            # A sequence has one history, in its first block.
            of_drafts = batch.accepted is not None
            return Into("causal_conv1d_update", (
                x, layer.taps, None if bias is None else bias.detach(), batch.offsets,
                batch.indices[:, 0] if of_drafts else batch.indices, batch.has_state, batch.accepted,
                own.inputs if of_drafts else own.history, "silu", own.order, NULL + 1), (y,))

        def rule(begin: int, end: int, by_token: bool, *of_sequences: Tensor | None) -> Into:
            part = (lambda t: t[begin:end, None]) if by_token else (lambda t: t[begin:end])
            return self.rule(layer, own.states, part(y), tuple(map(part, given.steps)), part(given.out), *of_sequences,
                             batch.accepted)

        if batch.accepted is not None:
            return [convolution(given.x[:rows], y), rule(0, rows, False, batch.indices, None, batch.offsets)]
        if batch.offsets is None:
            row = given.x.stride(0)
            x = given.x.as_strided((rows, 1, layer.channels), (row, row, 1))
            return [convolution(x, y[:, None]), rule(0, rows, True, batch.indices, None, None)]
        # A chunk of one token would take as long as one of many.
        of_decoding = [rule(0, decoding, True, batch.indices[:decoding], None, None)] if decoding else []
        return [convolution(given.x[:rows], y), *of_decoding,
                rule(decoding, rows, False, batch.prompt_indices, batch.prompt_has_state, batch.prompt_offsets)]


def states_of(layer: Layer, inputs: Tensor, states: Tensor) -> States:
    """The views of vLLM's caches that the ops take, without a copy."""
    width = layer.taps.shape[1]
    if tuple(states.shape[1:]) != layer.state or states.dtype not in (torch.float32, torch.bfloat16):
        raise Unfit(f"states of {list(states.shape)} in {states.dtype}")
    if inputs.dim() != 3 or inputs.dtype is not torch.bfloat16 or len(inputs) != len(states):
        raise Unfit(f"states of convolutions of {list(inputs.shape)} in {inputs.dtype}")
    _, *own = inputs.shape
    if own[1] == layer.channels and own[0] >= width - 1:
        # With drafts a block has more entries than a history. Batches without drafts use the first ones.
        order, history = "entries", inputs[:, :width - 1]
    elif own == [layer.channels, width - 1]:
        order, history = "channels", inputs
    else:
        raise Unfit(f"states of convolutions of {list(inputs.shape)} for {layer.channels} channels")
    for part in (history, states):
        apart = part.stride(0) * part.element_size()
        if not part[0].is_contiguous() or part.stride(0) < part[0].numel() or \
                part.is_cuda and (part.data_ptr() | apart) & 15:
            raise Unfit(f"states with strides of {list(part.stride())}")
    return States(inputs, history, order, states)


def _expect_convolution(module: nn.Module, channels: int) -> None:
    weight = module.conv1d.weight
    if module.activation not in ("silu", "swish"):
        raise Unfit(f"the activation {module.activation}")
    if weight.dim() != 3 or tuple(weight.shape[:2]) != (channels, 1) or weight.shape[2] not in _WIDTHS \
            or not weight.is_contiguous() or weight.dtype is not torch.bfloat16:
        raise Unfit(f"a convolution of {list(weight.shape)} in {weight.dtype}")


def _wide(module: nn.Module, heads: int, *names: str) -> dict[str, Tensor]:
    """Parameters of heads in float32: vLLM's own where they are, copies where not."""
    found = {}
    for name in names:
        parameter = getattr(module, name)
        if tuple(parameter.shape) != (heads,):
            raise Unfit(f"{name} of {list(parameter.shape)}")
        found[name] = parameter if parameter.dtype is torch.float32 else parameter.detach().float()
    return found


class GatedDeltaNet(Core):
    """The layers of Qwen3-Next and Qwen3.5. vLLM's op `qwen_gdn_attention_core` calls the method: Python inside of an
    op, so compiled code and its cache stay as they are."""

    method, op, written = "_forward_core", "gated-delta-rule", "core_attn_out"
    metadata = tuple("num_prefills num_decodes num_decode_tokens num_actual_tokens spec_sequence_masks "
                     "flashinfer_checkpoint_plan checkpoint has_initial_state non_spec_query_start_loc "
                     "non_spec_state_indices_tensor prefill_query_start_loc prefill_state_indices "
                     "prefill_has_initial_state num_spec_decodes spec_query_start_loc spec_state_indices_tensor "
                     "num_accepted_tokens".split())
    needs = ("gdn_prefill_backend", "enable_packed_recurrent_decode")

    def layer_of(self, module: nn.Module) -> Layer:
        heads, v_heads = (count // module.tp_size for count in (module.num_k_heads, module.num_v_heads))
        dim, v_dim = module.head_k_dim, module.head_v_dim
        if v_heads % heads or max(dim, v_dim) > _FEATURES:
            raise Unfit(f"{heads} heads of {dim} for {v_heads} of {v_dim}")
        channels = 2 * heads * dim + v_heads * v_dim
        _expect_convolution(module, channels)
        words = f"gated delta rules ({heads}/{v_heads} heads of {dim} x {v_dim})"
        return Layer(module, channels, (v_heads, v_dim, dim), words, _wide(module, v_heads, "A_log", "dt_bias"))

    def given(self, layer: Layer, arguments: dict[str, Tensor]) -> Given:
        return Given(arguments, arguments["mixed_qkv"], (arguments["a"], arguments["b"]), arguments["core_attn_out"])

    def batch_of(self, module: nn.Module, metadata) -> Batch | None:
        self.expect_metadata(metadata)
        if metadata.spec_sequence_masks is not None:
            return self._of_drafts(metadata)
        rows, indices = metadata.num_actual_tokens, metadata.non_spec_state_indices_tensor
        if not metadata.num_prefills:
            if not metadata.num_decodes or len(indices) < rows:
                return None
            return Batch(rows, rows, indices[:rows])
        if metadata.flashinfer_checkpoint_plan is not None or metadata.checkpoint is not None:
            return None  # states within a prompt are kept too
        offsets, of_prompts = metadata.non_spec_query_start_loc, metadata.prefill_query_start_loc
        sequences, several, decoding = len(offsets) - 1, len(of_prompts) - 1, metadata.num_decode_tokens
        if not 0 <= decoding == metadata.num_decodes == sequences - several < rows:
            return None
        return Batch(rows, decoding, indices[:sequences], offsets, metadata.has_initial_state[:sequences],
                     metadata.prefill_state_indices[:several], of_prompts, metadata.prefill_has_initial_state[:several])

    def _of_drafts(self, metadata) -> Batch | None:
        count = metadata.num_spec_decodes
        indices, accepted = metadata.spec_state_indices_tensor, metadata.num_accepted_tokens
        if metadata.num_prefills or metadata.num_decodes or not count or len(indices) < count:
            return None  # vLLM takes the tokens of both apart
        return Batch(metadata.num_actual_tokens, 0, indices[:count], metadata.spec_query_start_loc[:count + 1],
                     accepted=accepted[:count])

    def metadata_of(self, prototype, batch: Batch):
        rows, made, count = batch.rows, copy.copy(prototype), len(batch.indices)
        vars(made).update(num_prefills=0, num_prefill_tokens=0, num_actual_tokens=rows)
        if batch.accepted is None:
            vars(made).update(
                num_decodes=rows, num_decode_tokens=rows, num_spec_decodes=0, num_spec_decode_tokens=0,
                non_spec_query_start_loc=torch.arange(rows + 1, dtype=torch.int32, device=batch.indices.device),
                non_spec_state_indices_tensor=batch.indices, spec_sequence_masks=None)
        else:
            vars(made).update(
                num_decodes=0, num_decode_tokens=0, num_spec_decodes=count, num_spec_decode_tokens=rows,
                spec_query_start_loc=batch.offsets, spec_state_indices_tensor=batch.indices,
                num_accepted_tokens=batch.accepted,
                spec_sequence_masks=torch.ones(count, dtype=torch.bool, device=batch.indices.device))
        return made

    def rule(self, layer, states, y, steps, out, indices, has_state, offsets, accepted) -> Into:
        v_heads, v_dim, dim = layer.state
        keys = (layer.channels - v_heads * v_dim) // 2
        q, k, v = (part.unflatten(-1, (-1, own)) for part, own in zip(
            y.split([keys, keys, v_heads * v_dim], -1), (dim, dim, v_dim)))
        a, b = steps
        A_log, bias = (layer.wide[name].detach() for name in ("A_log", "dt_bias"))
        return Into("gated_delta_rule_update", (
            q, k, v, None, a, A_log, bias, None, b, states, indices, has_state, offsets, "softplus", "head", "l2", 0.0,
            1.0, -5.0, float(NULL), accepted), (out,))


class Mamba2(Core):
    """The mixers of Mamba-2, Bamba, Falcon-H1, Granite 4 and Nemotron-H, by vLLM's op `mamba_mixer2`."""

    method, op, written = "conv_ssm_forward", "ssd", "output"
    metadata = tuple("num_prefills num_prefill_tokens num_decodes num_decode_tokens num_accepted_tokens "
                     "checkpoint_chunk_idx has_initial_states_p query_start_loc_p state_indices_tensor_p "
                     "state_indices_tensor_d query_start_loc_d".split())

    def layer_of(self, module: nn.Module) -> Layer:
        heads, groups = (count // module.tp_size for count in (module.num_heads, module.n_groups))
        dim, state_dim = module.head_dim, module.ssm_state_size
        if module.use_replayssm:
            raise Unfit("states that are written once in several tokens (ReplaySSM)")
        if module.mamba_config.enable_stochastic_rounding:
            raise Unfit("states that are rounded at random")
        if module.num_heads % module.tp_size or heads % groups or max(dim, state_dim) > _FEATURES:
            raise Unfit(f"{heads} heads of {dim} x {state_dim} in {groups} groups")
        channels = heads * dim + 2 * groups * state_dim
        if module.tped_conv_size != channels or module.tped_intermediate_size != heads * dim \
                or module.tped_dt_size != heads:
            raise Unfit(f"a convolution of {module.tped_conv_size} channels for {heads} heads of {dim}")
        _expect_convolution(module, channels)
        words = f"Mamba-2 ({heads} heads of {dim} x {state_dim}, {groups} groups)"
        return Layer(module, channels, (heads, dim, state_dim), words, _wide(module, heads, "A", "D", "dt_bias"))

    def given(self, layer: Layer, arguments: dict[str, Tensor]) -> Given:
        projected, heads, dim = arguments["projected_states"], *layer.state[:2]
        _, x, dt = projected.split([heads * dim, layer.channels, heads], -1)
        return Given(arguments, x, (dt,), arguments["output"].unflatten(-1, (heads, dim)))

    def batch_of(self, module: nn.Module, metadata) -> Batch | None:
        self.expect_metadata(metadata)
        if metadata.num_accepted_tokens is not None and metadata.num_decodes:
            return self._of_drafts(metadata)
        if metadata.checkpoint_chunk_idx is not None:
            return None  # states within a prompt are kept too
        # Sequences behind those with tokens are padding.
        decoding = metadata.num_decode_tokens
        if decoding > metadata.num_decodes or metadata.num_prefills and decoding < metadata.num_decodes:
            return None
        of_decoding = metadata.state_indices_tensor_d[:decoding, 0] if decoding else None
        if not metadata.num_prefills:
            return Batch(decoding, decoding, of_decoding) if decoding else None
        several = metadata.num_prefills
        indices, known = (value[:several] for value in (metadata.state_indices_tensor_p, metadata.has_initial_states_p))
        offsets = metadata.query_start_loc_p
        rows = decoding + metadata.num_prefill_tokens
        if len(offsets) != several + 1:
            return None
        prompts = indices, offsets, known
        if not decoding:
            return Batch(rows, 0, indices, offsets, known, *prompts)
        begins = torch.arange(decoding, dtype=offsets.dtype, device=offsets.device)
        return Batch(rows, decoding, torch.cat([of_decoding, indices]), torch.cat([begins, offsets + decoding]),
                     torch.cat([torch.ones_like(begins, dtype=known.dtype), known]), *prompts)

    def _of_drafts(self, metadata) -> Batch | None:
        count, rows, indices = metadata.num_decodes, metadata.num_decode_tokens, metadata.state_indices_tensor_d
        if metadata.num_prefills or len(indices) < count or metadata.query_start_loc_d is None:
            return None  # vLLM takes the tokens of both apart
        return Batch(rows, 0, indices[:count], metadata.query_start_loc_d[:count + 1],
                     accepted=metadata.num_accepted_tokens[:count])

    def metadata_of(self, prototype, batch: Batch):
        rows, made, of_drafts = batch.rows, copy.copy(prototype), batch.accepted is not None
        vars(made).update(
            num_prefills=0, num_prefill_tokens=0, num_decodes=len(batch.indices), num_decode_tokens=rows,
            num_accepted_tokens=batch.accepted, query_start_loc_d=batch.offsets if of_drafts else None,
            state_indices_tensor_d=batch.indices if of_drafts else batch.indices[:, None])
        return made

    def rule(self, layer, states, y, steps, out, indices, has_state, offsets, accepted) -> Into:
        heads, dim, state_dim = layer.state
        groups = (layer.channels - heads * dim) // 2
        x, B, C = (part.unflatten(-1, (-1, own)) for part, own in zip(
            y.split([heads * dim, groups, groups], -1), (dim, state_dim, state_dim)))
        A, D, bias = (layer.wide[name].detach() for name in ("A", "D", "dt_bias"))
        return Into("ssd_update", (
            x, *steps, A, None, B, C, D, bias, states, indices, has_state, offsets, True, 0.0, 0.0, float(NULL), accepted),
            (out,))
