"""Tiny models that are no causal language models, and their inputs: encoders, encoders with decoders, and models of
pictures and sound. architectures.py patches them and compares them with the unpatched ones.

A configuration has small sizes for all that `architectures.py` knows, and what is here beside them.
"""
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

TOKENS, VOCABULARY = 9, 128
_IMAGE = 32  # rows and columns of a picture
_PATCH = 8


@dataclass(frozen=True)
class Whole:
    """A model class, what its configuration has beside small sizes, and its inputs."""

    name: str
    inputs: Callable  # of the model and a generator: the arguments of a call
    config: dict = field(default_factory=dict)


def _ids(model, generator, **_) -> dict:
    """Text, the second row padded."""
    ids = torch.randint(8, VOCABULARY, (2, TOKENS), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    return dict(input_ids=ids.where(mask.bool(), 1), attention_mask=mask)


def _both(model, generator) -> dict:
    """Text for the encoder, and text for the decoder."""
    return _ids(model, generator) | dict(
        decoder_input_ids=torch.randint(8, VOCABULARY, (2, 5), generator=generator))


def _long(model, generator) -> dict:
    ids = torch.randint(8, VOCABULARY, (2, 16), generator=generator)
    return dict(input_ids=ids, decoder_input_ids=ids[:, :5])


def _picture(model, generator) -> dict:
    return dict(pixel_values=torch.randn(2, 3, _IMAGE, _IMAGE, generator=generator))


def _picture_and_text(model, generator) -> dict:
    return _ids(model, generator) | _picture(model, generator)


def _wave(model, generator) -> dict:
    return dict(input_values=torch.randn(2, 1200, generator=generator))


def _wave_and_text(model, generator) -> dict:
    return _wave(model, generator) | dict(
        decoder_input_ids=torch.randint(8, VOCABULARY, (2, 5), generator=generator))


def _mel(model, generator) -> dict:
    return dict(input_features=torch.randn(2, 16, 32, generator=generator),
                decoder_input_ids=torch.randint(8, VOCABULARY, (2, 5), generator=generator))


def _spectrogram(model, generator) -> dict:
    return dict(input_values=torch.randn(2, 32, 16, generator=generator))


def _speech(model, generator) -> dict:
    return _ids(model, generator) | dict(decoder_input_values=torch.randn(2, 5, 80, generator=generator))


def _marked(tokens: int, shape: tuple[int, ...] = (2, 3, _IMAGE, _IMAGE), **others) -> Callable:
    """Text that begins with this number of tokens that stand for a picture."""
    def inputs(model, generator) -> dict:
        config = model.config
        mark = next(value for name in ("image_token_id", "image_token_index")
                    if isinstance(value := getattr(config, name, None), int))
        ids = torch.randint(8, VOCABULARY, (2, tokens + TOKENS), generator=generator)
        ids[ids == mark] = 8
        ids[:, 1:1 + tokens] = mark
        return dict(input_ids=ids, attention_mask=torch.ones_like(ids),
                    pixel_values=torch.randn(*shape, generator=generator), **others)
    return inputs


def _grid(rows: int, features: int, tokens: int) -> Callable:
    """Pictures as rows of patches, as Qwen's models have them."""
    grid = torch.tensor([[1, 4, 4], [1, 4, 4]])
    marked = _marked(tokens, (rows, features), image_grid_thw=grid)

    def inputs(model, generator) -> dict:
        given = marked(model, generator)
        ids = given["input_ids"]
        ids[:, 0] = getattr(model.config, "vision_start_token_id", 8)
        given["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
        return given
    return inputs


_VISION = dict(image_size=_IMAGE, patch_size=_PATCH, num_channels=3)
_TOKEN = dict(image_token_id=5, image_token_index=5)
_LLAMA = dict(model_type="llama", hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
              num_key_value_heads=2, vocab_size=VOCABULARY, max_position_embeddings=256, pad_token_id=0)
_TOWER = dict(_VISION, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
_QWEN_ROPE = dict(rope_type="default", type="default", mrope_section=[2, 3, 3], rope_theta=10000.0)
_QWEN = dict(_LLAMA, rope_scaling=_QWEN_ROPE, rope_parameters=_QWEN_ROPE)
_QWEN_IDS = dict(image_token_id=5, video_token_id=6, vision_start_token_id=3, vision_end_token_id=4)
_CONV = dict(conv_dim=(32, 32), conv_kernel=(10, 4), conv_stride=(5, 4), num_feat_extract_layers=2,
             num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, apply_spec_augment=False, mask_time_prob=0.0,
             layerdrop=0.0)

WHOLE = {
    # encoders
    **{kind: Whole(name, _ids) for kind, name in {
        "bert": "BertForMaskedLM", "roberta": "RobertaForMaskedLM", "electra": "ElectraForMaskedLM",
        "albert": "AlbertForMaskedLM", "distilbert": "DistilBertForMaskedLM", "mpnet": "MPNetForMaskedLM",
        "xlm-roberta": "XLMRobertaForMaskedLM", "layoutlm": "LayoutLMForMaskedLM",
        "modernbert": "ModernBertForMaskedLM"}.items()},
    "deberta": Whole("DebertaForMaskedLM", _ids, dict(relative_attention=True, pos_att_type=["c2p", "p2c"])),
    "deberta-v2": Whole("DebertaV2ForMaskedLM", _ids, dict(relative_attention=True, pos_att_type=["c2p", "p2c"])),
    "esm": Whole("EsmForMaskedLM", _ids, dict(
        position_embedding_type="rotary", mask_token_id=7, vocab_size=VOCABULARY)),
    # encoders with decoders
    **{kind: Whole(name, _both) for kind, name in {
        "bart": "BartForConditionalGeneration", "mbart": "MBartForConditionalGeneration",
        "t5": "T5ForConditionalGeneration", "mt5": "MT5ForConditionalGeneration",
        "umt5": "UMT5ForConditionalGeneration", "pegasus": "PegasusForConditionalGeneration",
        "m2m_100": "M2M100ForConditionalGeneration", "blenderbot": "BlenderbotForConditionalGeneration",
        "blenderbot-small": "BlenderbotSmallForConditionalGeneration", "plbart": "PLBartForConditionalGeneration",
        "switch_transformers": "SwitchTransformersForConditionalGeneration"}.items()},
    "marian": Whole("MarianMTModel", _both, dict(decoder_vocab_size=VOCABULARY)),
    "nllb-moe": Whole("NllbMoeForConditionalGeneration", _both, dict(num_experts=4, expert_capacity=16)),
    "led": Whole("LEDForConditionalGeneration", _long, dict(
        attention_window=8, max_encoder_position_embeddings=64, max_decoder_position_embeddings=64)),
    "longt5": Whole("LongT5ForConditionalGeneration", _long, dict(local_radius=4, global_block_size=4)),
    # pictures
    **{kind: Whole(name, _picture, _VISION) for kind, name in {
        "vit": "ViTModel", "deit": "DeiTModel", "beit": "BeitModel", "dinov2": "Dinov2Model",
        "dinov2_with_registers": "Dinov2WithRegistersModel", "dinov3_vit": "DINOv3ViTModel"}.items()},
    "vit_mae": Whole("ViTMAEModel", _picture, dict(_VISION, mask_ratio=0.0)),
    "swin": Whole("SwinModel", _picture, dict(
        _VISION, patch_size=4, embed_dim=16, depths=[1, 1], num_heads=[2, 4], window_size=4)),
    "swinv2": Whole("Swinv2Model", _picture, dict(
        _VISION, patch_size=4, embed_dim=16, depths=[1, 1], num_heads=[2, 4], window_size=4)),
    "convnext": Whole("ConvNextModel", _picture, dict(
        hidden_sizes=[16, 32], depths=[1, 1], num_stages=2, image_size=_IMAGE)),
    "convnextv2": Whole("ConvNextV2Model", _picture, dict(
        hidden_sizes=[16, 32], depths=[1, 1], num_stages=2, image_size=_IMAGE)),
    "segformer": Whole("SegformerModel", _picture, dict(
        hidden_sizes=[16, 32], depths=[1, 1], num_encoder_blocks=2, num_attention_heads=[1, 2], sr_ratios=[2, 1],
        patch_sizes=[7, 3], strides=[4, 2], mlp_ratios=[2, 2], decoder_hidden_size=32)),
    "yolos": Whole("YolosModel", _picture, dict(_VISION, image_size=[_IMAGE, _IMAGE], num_detection_tokens=4)),
    "detr": Whole("DetrModel", _picture, dict(
        use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, num_queries=5, backbone_config=dict(
            model_type="resnet", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], out_features=["stage2"]))),
    "sam": Whole("SamModel", _picture, dict(
        vision_config=dict(_TOWER, output_channels=16, mlp_dim=64, window_size=2, global_attn_indexes=[1],
                           num_pos_feats=8),
        prompt_encoder_config=dict(hidden_size=16, image_size=_IMAGE, patch_size=_PATCH, mask_input_channels=4),
        mask_decoder_config=dict(hidden_size=16, mlp_dim=32, num_attention_heads=2, iou_head_hidden_dim=16))),
    # pictures and text
    "clip": Whole("CLIPModel", _picture_and_text, dict(
        text_config=dict(_LLAMA, model_type="clip_text_model", eos_token_id=2), vision_config=_TOWER,
        projection_dim=16)),
    "siglip": Whole("SiglipModel", _picture_and_text, dict(
        text_config=dict(_LLAMA, model_type="siglip_text_model", projection_size=32), vision_config=_TOWER)),
    "blip": Whole("BlipForConditionalGeneration", _picture_and_text, dict(
        text_config=dict(_LLAMA, model_type="blip_text_model", encoder_hidden_size=32), vision_config=_TOWER)),
    "blip-2": Whole("Blip2ForConditionalGeneration", _marked(4), dict(
        _TOKEN, vision_config=_TOWER, num_query_tokens=4, qformer_config=dict(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, encoder_hidden_size=32,
            vocab_size=VOCABULARY),
        text_config=dict(model_type="opt", hidden_size=64, word_embed_proj_dim=64, ffn_dim=96, num_hidden_layers=2,
                         num_attention_heads=4, vocab_size=VOCABULARY, max_position_embeddings=256))),
    "git": Whole("GitForCausalLM", _picture_and_text, dict(
        vision_config=_TOWER, hidden_size=64, vocab_size=VOCABULARY)),
    "llava": Whole("LlavaForConditionalGeneration", _marked(16), dict(
        _TOKEN, vision_config=dict(_TOWER, model_type="clip_vision_model"), text_config=_LLAMA)),
    "vipllava": Whole("VipLlavaForConditionalGeneration", _marked(16), dict(
        _TOKEN, vision_config=dict(_TOWER, model_type="clip_vision_model"), text_config=_LLAMA,
        vision_feature_layers=[-2, -1])),
    "paligemma": Whole("PaliGemmaForConditionalGeneration", _marked(16), dict(
        _TOKEN, vision_config=dict(_TOWER, model_type="siglip_vision_model", vision_use_head=False), projection_dim=64,
        text_config=dict(_LLAMA, model_type="gemma", head_dim=16))),
    "gemma3": Whole("Gemma3ForConditionalGeneration", _marked(4), dict(
        _TOKEN, vision_config=dict(_TOWER, model_type="siglip_vision_model", vision_use_head=False),
        mm_tokens_per_image=4, text_config=dict(_LLAMA, model_type="gemma3_text", head_dim=16, sliding_window=8))),
    "idefics3": Whole("Idefics3ForConditionalGeneration", _marked(4, (2, 1, 3, _IMAGE, _IMAGE)), dict(
        _TOKEN, vision_config=_TOWER, text_config=_LLAMA, scale_factor=2)),
    "smolvlm": Whole("SmolVLMForConditionalGeneration", _marked(4, (2, 1, 3, _IMAGE, _IMAGE)), dict(
        _TOKEN, vision_config=_TOWER, text_config=_LLAMA, scale_factor=2)),
    "internvl": Whole("InternVLForConditionalGeneration", _marked(4), dict(
        _TOKEN, vision_config=dict(_TOWER, model_type="internvl_vision", image_size=[_IMAGE] * 2,
                                   patch_size=[_PATCH] * 2), text_config=_LLAMA, image_seq_length=4)),
    "mllama": Whole("MllamaForConditionalGeneration", lambda model, generator: _ids(model, generator) | dict(
        pixel_values=torch.randn(2, 1, 1, 3, _IMAGE, _IMAGE, generator=generator),
        aspect_ratio_ids=torch.ones(2, 1, dtype=torch.int64),
        aspect_ratio_mask=torch.ones(2, 1, 1, dtype=torch.int64),
        cross_attention_mask=torch.ones(2, TOKENS, 1, 1, dtype=torch.int64)), dict(
            vision_config=dict(_TOWER, attention_heads=4, num_global_layers=1, intermediate_layers_indices=[0],
                               vision_output_dim=64, max_num_tiles=1, supported_aspect_ratios=[[1, 1]]),
            text_config=dict(_LLAMA, cross_attention_layers=[1], num_hidden_layers=3, rope_scaling=None,
                             rope_parameters=dict(rope_type="default", rope_theta=10000.0)))),
    "mllama_text_model": Whole("MllamaForCausalLM", _ids, dict(
        cross_attention_layers=[], rope_scaling=None, rope_parameters=dict(rope_type="default", rope_theta=10000.0))),
    "qwen2_vl": Whole("Qwen2VLForConditionalGeneration", _grid(32, 3 * 2 * 8 * 8, 4), dict(
        _QWEN_IDS, vision_config=dict(embed_dim=32, depth=2, num_heads=4, hidden_size=64, patch_size=8,
                                      mlp_ratio=2), text_config=dict(_QWEN, model_type="qwen2_vl_text"))),
    "qwen2_5_vl": Whole("Qwen2_5_VLForConditionalGeneration", _grid(32, 3 * 2 * 8 * 8, 4), dict(
        _QWEN_IDS, vision_config=dict(hidden_size=32, depth=2, num_heads=4, intermediate_size=64, out_hidden_size=64,
                                      patch_size=8, window_size=32, fullatt_block_indexes=[1]),
        text_config=dict(_QWEN, model_type="qwen2_5_vl_text"))),
    "qwen3_vl": Whole("Qwen3VLForConditionalGeneration", _grid(32, 3 * 2 * 8 * 8, 4), dict(
        _QWEN_IDS, vision_config=dict(hidden_size=32, depth=2, num_heads=4, intermediate_size=64, out_hidden_size=64,
                                      patch_size=8, deepstack_visual_indexes=[0], num_position_embeddings=16),
        text_config=dict(_QWEN, model_type="qwen3_vl_text", head_dim=16))),
    # sound
    **{kind: Whole(name, _wave, _CONV) for kind, name in {
        "wav2vec2": "Wav2Vec2ForCTC", "hubert": "HubertForCTC", "wavlm": "WavLMForCTC",
        "data2vec-audio": "Data2VecAudioForCTC"}.items()},
    "whisper": Whole("WhisperForConditionalGeneration", _mel, dict(
        num_mel_bins=16, max_source_positions=16, max_target_positions=64, suppress_tokens=None,
        begin_suppress_tokens=None)),
    "moonshine": Whole("MoonshineForConditionalGeneration", _wave_and_text, dict(
        encoder_num_key_value_heads=4, decoder_num_key_value_heads=4, encoder_num_attention_heads=4,
        decoder_num_attention_heads=4)),
    "speecht5": Whole("SpeechT5ForTextToSpeech", _speech, dict(
        num_mel_bins=80, speaker_embedding_dim=0, speech_decoder_prenet_dropout=0.0, speech_decoder_prenet_units=32,
        speech_decoder_postnet_units=32, max_text_positions=64, max_speech_positions=64, encoder_layerdrop=0.0,
        decoder_layerdrop=0.0)),
    "audio-spectrogram-transformer": Whole("ASTModel", _spectrogram, dict(
        patch_size=4, max_length=32, num_mel_bins=16, frequency_stride=4, time_stride=4)),
}
