"""The run config: everything a run depends on, as one frozen pydantic tree read from one TOML file.

- One section per table of the file; unknown keys are refused; the docstring under a field is its help and its
  description in spec/run.schema.json.
- Types are strict: `steps = "10"` or `steps = true` is an error, not a guess. An integer is a float too.
- A relative path in the file is taken from the file's own folder, one in `--set` from the current directory:
  a run file works from anywhere, and `--set` means what the shell completes. Loaded paths are absolute.
- Whatever is wrong is a `ConfigError` that says what, got, expected and the remedy, all problems at once.
- It imports no torch and stands below all other modules; only what builds a run reads it.
"""

from pithtrain.config.checks import MeshShape, check_files, check_run, resolve_mesh, smallest_world
from pithtrain.config.loading import load, parse, refusal
from pithtrain.config.sections import ConfigError, RunConfig, fingerprint, json_schema

__all__ = ["MeshShape", "check_files", "check_run", "resolve_mesh", "smallest_world"]
__all__ += ["load", "parse", "refusal"]
__all__ += ["ConfigError", "RunConfig", "fingerprint", "json_schema"]
