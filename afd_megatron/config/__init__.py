"""What a job may ask for: `load_config` reads it, `schema` says all of it. Knows no torch."""

from afd_megatron.config.load import dump_config, load_config
from afd_megatron.config.schema import (
    NOT_YET,
    ConnectorConfig,
    ControlConfig,
    EngineConfig,
    GraphsConfig,
    JobConfig,
    LaunchConfig,
    ModelConfig,
    ObserveConfig,
    PipelineConfig,
    SamplingConfig,
    TopologyConfig,
    WorkloadConfig,
)

__all__ = [
    "NOT_YET",
    "ConnectorConfig",
    "ControlConfig",
    "EngineConfig",
    "GraphsConfig",
    "JobConfig",
    "LaunchConfig",
    "ModelConfig",
    "ObserveConfig",
    "PipelineConfig",
    "SamplingConfig",
    "TopologyConfig",
    "WorkloadConfig",
    "dump_config",
    "load_config",
]
