"""Variables whose rows come and go, with their state."""

from gpuopt.tables.rows import Rows as Rows
from gpuopt.tables.rows import rows as rows
