"""Maps plugins/, benches/ and native/ to import packages; everything else is in pyproject.toml."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["llamamg", "llamamg.*"]), "llamamg_plugins", "llamamg_benches", "llamamg_native"],
    package_dir={"llamamg_plugins": "plugins", "llamamg_benches": "benches", "llamamg_native": "native"},
    # An installed copy can still build: the patch queue and our sources travel with it.
    package_data={
        "llamamg": ["py.typed", "**/*.h", "**/*.html"],
        "llamamg_native": ["UPSTREAM", "CMakeLists.txt", "patches/series", "patches/*/*.patch", "src/*"],
    },
)
