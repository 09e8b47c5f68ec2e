"""An op without PyTorch, through the C API: prints 2.0."""
import ctypes

from fftune import _library

plan = _library.Plan(-1, {"op": "rmsnorm", "dtype": "f32", "m": 1, "d": 4})
x, w, y = (ctypes.c_float * 4)(3, 0, 0, 0), (ctypes.c_float * 4)(1, 1, 1, 1), (ctypes.c_float * 4)()
pointers = plan.addresses(*(ctypes.addressof(t) for t in (x, w, y)))
_library.check_status(
    _library.library().fftune_plan_run(plan.handle, pointers, plan.count, None, None))
print(round(y[0], 4))
