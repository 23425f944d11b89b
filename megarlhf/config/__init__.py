"""Typed configuration. A command has a file of its keys, others hold what commands share; `load.py` reads a file."""

from megarlhf.config.algo import AlgoConfig, KLConfig, RolloutCorrectionConfig
from megarlhf.config.auxiliary import EMAConfig, PTXConfig, ReferenceUpdateConfig
from megarlhf.config.choices import StopConfig
from megarlhf.config.commands import (
    EvalConfig,
    MicroBatchConfig,
    RMConfig,
    SFTConfig,
    TrainConfig,
)
from megarlhf.config.conversations import ConversationConfig
from megarlhf.config.data import DataConfig, PromptDataConfig, SFTDataConfig, SourceConfig, describe_sources
from megarlhf.config.evaluate import EvaluateConfig
from megarlhf.config.frozen import FrozenModel
from megarlhf.config.generate import GenerateConfig
from megarlhf.config.load import config_of, dump_config, load_config
from megarlhf.config.lora import LoraConfig
from megarlhf.config.observe import ObserveConfig
from megarlhf.config.old_keys import translate
from megarlhf.config.preference import DPOConfig
from megarlhf.config.profile import ProfileConfig
from megarlhf.config.rewards import RewardConfig
from megarlhf.config.rl import RLConfig, RLEvalConfig, RLTrainConfig
from megarlhf.config.role_table import ROLES, trained_roles
from megarlhf.config.roles import (
    KernelsConfig,
    ModelConfig,
    OffloadConfig,
    OptimConfig,
    ParallelConfig,
    RoleConfig,
)
from megarlhf.config.rollout import Dtype, LogprobGapConfig, RolloutConfig, RolloutParallelConfig, VllmConfig
from megarlhf.config.run import CheckpointConfig, RunConfig
from megarlhf.config.selection import DynamicSamplingConfig, OverlongConfig
from megarlhf.config.shuffle import Shuffle
from megarlhf.config.skip import SkipConfig
from megarlhf.config.tracking import AccuracyConfig, SamplesConfig, WandbConfig
from megarlhf.config.watchdog import StragglersConfig, WatchdogConfig
