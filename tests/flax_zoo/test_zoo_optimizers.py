"""Every optimizer of Optax does in a pipeline of two stages what it does on the whole model, or is refused."""

import pytest
from flax_zoo.optimizers import EXAMPLES, LOSSES_AND_TOOLS, exported
from flax_zoo.pipelined import KEY, WIDE, batches, cases, check_optimizer, pipeline_with

REFUSED = [name for name, example in EXAMPLES.items() if example.refused]


def test_every_name_has_an_example():
    missing = set(exported()) - {*EXAMPLES, *LOSSES_AND_TOOLS}
    assert not missing, f"add {sorted(missing)} to tests/flax_zoo/optimizers.py"
    gone = {*EXAMPLES, *LOSSES_AND_TOOLS} - set(exported())
    assert not gone, f"remove {sorted(gone)} from tests/flax_zoo/optimizers.py"


def slow(table, dtype):
    return dtype == "bfloat16" or (table == "asynchronous" and dtype != "float32")


@pytest.mark.first_case
@pytest.mark.parametrize("name,table,dtype", cases(EXAMPLES, slow))
@pytest.mark.sampled(40, others="exhaustive")
def test_equals_plain_optax(name, table, dtype):
    check_optimizer(name, table, dtype)


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.sampled(4, others="exhaustive")
def test_refused(name):
    pipe = pipeline_with(EXAMPLES[name].make(), "1F1B", "float32")
    with pytest.raises(ValueError, match=EXAMPLES[name].refused):
        pipe.init(KEY, batches(WIDE, "float32")[0])
