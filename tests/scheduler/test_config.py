import pytest

from deepinfer.config.scheduler import SchedulerConfig
from deepinfer.errors import ConfigError


def test_defaults_are_valid():
    config = SchedulerConfig()
    assert config.chunked_prefill
    assert config.max_num_batched_tokens >= config.max_num_seqs


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_num_seqs": True}, "max_num_seqs is True"),
        ({"max_model_len": 1.5}, r"max_model_len is 1\.5"),
        ({"max_lookahead": -1}, "max_lookahead is -1"),
        ({"pipeline_depth": 3}, "pipeline_depth is 3"),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 7}, "max_num_batched_tokens is 7.*max_num_seqs=8"),
        ({"max_num_batched_tokens": 4095, "chunked_prefill": False}, "is 4095.*max_model_len=4096"),
    ],
)
def test_bad_options_are_refused_by_name(changes, message):
    with pytest.raises(ConfigError, match=message):
        SchedulerConfig(**changes)
