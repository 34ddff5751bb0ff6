"""Leaves of many shapes in few arrays of fixed shapes.

One program runs on all devices, so every device holds arrays of the same shapes, although one stage
has an embedding and another stage has a head. A `Packing` gives each *owner* (a stage's program, a
message) a place for each of its leaves in

- *pools*: one array `[n, *shape]` per shape and dtype. Row i is leaf i. Pools suit leaves that most
  stages have.
- *flat vectors*: one array `[size]` per dtype. Vectors suit leaves whose pool would be mostly
  padding. Pools add up the most leaves of each shape over the owners, and a vector the most of all
  together, so a vector has no padding if owners are equal in bytes but not in shapes.

A leaf that is split over automatic axes of the mesh (tensor parallelism) has a *spec*: for each of
its dims the axis or axes that it is split over, or None. Leaves of one spec share a pool, which is
split in the same way. Vectors hold no leaves with a spec.

A leaf without elements needs no room: it has a place in no array.

A leaf may lie in the memory of the host, always in a pool. A large one is cut into equal *chunks*, each one row of the
pool. `read` brings the leaf at a place to the device, and `write` takes it back.

Every device allocates each array for its largest owner. `Packing.used_bytes` says how many bytes an
owner uses.
"""

from jpipe.packing.access import Lead as Lead
from jpipe.packing.access import add_all as add_all
from jpipe.packing.access import each_row as each_row
from jpipe.packing.access import index as index
from jpipe.packing.access import is_on_host as is_on_host
from jpipe.packing.access import read as read
from jpipe.packing.access import read_all as read_all
from jpipe.packing.access import row_of as row_of
from jpipe.packing.access import sum_of_rows as sum_of_rows
from jpipe.packing.access import write as write
from jpipe.packing.access import write_all as write_all
from jpipe.packing.pack import Packing as Packing
from jpipe.packing.parts import Part as Part
from jpipe.packing.places import CHUNK as CHUNK
from jpipe.packing.places import Leaf as Leaf
from jpipe.packing.places import Place as Place
from jpipe.packing.places import array_bytes as array_bytes
from jpipe.packing.places import num_chunks as num_chunks
from jpipe.packing.pools import MOST_PADDING as MOST_PADDING
from jpipe.packing.specs import axes as axes
from jpipe.packing.specs import axes_by_dim as axes_by_dim
from jpipe.packing.specs import divisible as divisible
from jpipe.packing.specs import gathered as gathered
from jpipe.packing.specs import part_shape as part_shape
from jpipe.packing.specs import split_as as split_as
from jpipe.packing.specs import without as without
