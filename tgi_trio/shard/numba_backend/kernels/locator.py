"""Where numba keeps a kernel within the cache: by its place in the package, not on the disk.

The folder's name says what all kernels are made of (`cache.py`): a package installed anew, or
elsewhere, finds what an equal one has compiled. Numba itself goes by the path of a file.
"""

from __future__ import annotations

from pathlib import Path

from numba.core.caching import CacheImpl, UserProvidedCacheLocator

_HERE = Path(__file__).parent.resolve()


class KernelLocator(UserProvidedCacheLocator):
    """As numba's own for the folder it is told, but for the name of what is inside."""

    @classmethod
    def from_function(cls, py_func, py_file):
        """Return a locator of a function of ours, else None: others are found as ever."""
        if not Path(py_file).resolve().is_relative_to(_HERE):
            return None
        return super().from_function(py_func, py_file)

    @classmethod
    def get_suitable_cache_subpath(cls, py_file):
        """Return the folder of a file of ours, from the kernels' own on."""
        return "_".join(Path(py_file).resolve().parent.relative_to(_HERE.parent).parts)


# As numba's configuration wants them (CACHE_LOCATOR_CLASSES).
LOCATORS = ",".join(
    [
        f"{KernelLocator.__module__}.{KernelLocator.__name__}",
        *(each.__name__ for each in CacheImpl._locator_classes),
    ]
)
