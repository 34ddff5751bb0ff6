"""Every layer class of Flax does in a pipeline of two stages what it does in plain Flax, or is refused."""

import pytest
from flax_zoo.layers import CLASSES, EXAMPLES, NO_LAYERS
from flax_zoo.pipelined import KEY, batches, cases, check_layer, layer_pipeline

REFUSED = [name for name, example in EXAMPLES.items() if example.refused]


def test_every_class_has_an_example():
    missing = set(CLASSES) - {*EXAMPLES, *NO_LAYERS}
    assert not missing, f"add an example of {sorted(missing)} to tests/flax_zoo/layers.py"
    assert {*EXAMPLES, *NO_LAYERS} == set(CLASSES)


def slow(table, dtype):
    return table == "asynchronous" and dtype != "float32"


@pytest.mark.first_case
@pytest.mark.parametrize("name,table,dtype", cases(EXAMPLES, slow))
@pytest.mark.sampled(16, others="exhaustive")
def test_equals_plain_flax(name, table, dtype):
    check_layer(name, table, dtype)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    pipe = layer_pipeline(name, "1F1B", "float32")
    with pytest.raises(ValueError, match=EXAMPLES[name].refused):
        pipe.init(KEY, batches(EXAMPLES[name], "float32")[0])
