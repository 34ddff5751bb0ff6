"""The measured Gantt chart of a step: what every device has done, and when, from JAX's profiler.

- `Pipeline.trace` runs steps of one minibatch and returns their `Trace`.
- `record` traces the steps of any loop.
- `draw` draws several traces on one axis of time, such as two schedules of one model.
- `read` reads a trace that `Trace.save` has written as JSON.
"""

from jpipe.trace._cells import Cell as Cell
from jpipe.trace._cells import Execution as Execution
from jpipe.trace._record import Recording as Recording
from jpipe.trace._record import record as record
from jpipe.trace._trace import PERFETTO as PERFETTO
from jpipe.trace._trace import Trace as Trace
from jpipe.trace._trace import draw as draw
from jpipe.trace._trace import read as read

__all__ = ["PERFETTO", "Cell", "Execution", "Recording", "Trace", "draw", "read", "record"]
