"""The demo's tests share the processors with other processes, as the demo itself does."""

from replaybuf.demo.blas import use_one_thread

use_one_thread()
