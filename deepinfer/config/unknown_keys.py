"""Keys of a ``config.json`` that the reader does not know: misspelt ones are refused, others reported once."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepinfer.errors import ConfigError

logger = logging.getLogger(__name__)

HOUSEKEEPING: frozenset[str] = frozenset(
    """
    _attn_implementation _name_or_path add_cross_attention architectures auto_map bad_words_ids begin_suppress_tokens
    bos_token_id chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample
    dtype early_stopping encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty finetuning_task
    forced_bos_token_id forced_eos_token_id id2label initializer_range is_decoder is_encoder_decoder label2id
    length_penalty max_length max_new_tokens min_length model_type no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences output_attentions output_hidden_states output_scores pad_token_id prefix problem_type
    pruned_heads remove_invalid_values repetition_penalty return_dict return_dict_in_generate sep_token_id
    suppress_tokens task_specific_params temperature tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p
    torch_dtype torchscript transformers_version typical_p use_bfloat16 use_cache
    """.split()  # noqa: SIM905 - as a list literal it would take 60 lines
)
"""What Hugging Face's programs write into any configuration, at the top or in a section: no arithmetic is in it."""

_ALIKE = 0.8
"""How much of two names has to agree (difflib's ratio) for one to be the other, misspelt. High: what is taken for a
misspelling makes a checkpoint unusable until the file is changed."""


@dataclass(frozen=True, slots=True)
class Section:
    """One object of the file."""

    where: str
    """Its name with a dot behind it; empty for the top."""
    values: Any
    """Anything but an object has no keys; the reader of the section complains about it."""
    known: Collection[str]
    ignored: Collection[str] = ()
    """Keys that belong there and have no effect, besides :data:`HOUSEKEEPING`."""


def check_unknown_keys(sections: Sequence[Section]) -> None:
    """Look for keys that nothing will read, and warn of them together.

    Raises:
        ConfigError: one is like a known key that is absent, which would quietly take its default.
    """
    unknown = []
    for section in sections:
        if not isinstance(section.values, Mapping):
            continue
        absent = [key for key in section.known if key not in section.values]
        for key in sorted(set(section.values) - set(section.known) - set(section.ignored) - HOUSEKEEPING):
            meant = difflib.get_close_matches(key, absent, n=1, cutoff=_ALIKE)
            if meant:
                raise ConfigError(
                    f"config key {section.where}{key} is unknown",
                    why=f"it is like {section.where}{meant[0]}, which is absent",
                    fix=f"did you mean {meant[0]}? then rename the key in config.json; if it is another, remove it, "
                    f"and give {meant[0]} if the model has one",
                )
            unknown.append(section.where + key)
    if unknown:
        logger.warning("config keys not used by this engine: %s", ", ".join(unknown))
