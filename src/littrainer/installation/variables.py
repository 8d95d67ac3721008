"""Environment variables that change what a training does: names and values, without secrets."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from littrainer.arguments.secrets import holds_a_secret, without_secrets

HIDDEN = "(hidden)"
# Whose variables -> beginnings of their names.
PREFIXES: dict[str, tuple[str, ...]] = {
    "littrainer": ("LITTRAINER_",),
    "Lightning": ("PL_", "LT_", "LIGHTNING_"),
    "accelerate": ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "MIXED_PRECISION"),
    "torch": ("TORCH", "PYTORCH_", "CUDA_", "CUBLAS_", "CUDNN_", "NCCL_", "GLOO_", "TRITON_", "XLA_", "PJRT_"),
    "other devices": ("HIP_", "ROCR_", "HSA_", "ZE_", "NVIDIA_", "ASCEND_", "PT_HPU_", "TPU_"),
    "threads": ("OMP_", "MKL_", "OPENBLAS_", "KMP_", "GOMP_", "NUMEXPR_", "RAYON_", "TOKENIZERS_"),
    "launchers": ("SLURM_N", "SLURM_STEP_", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_JOB_ID", "PMI_", "MPI_", "MV2_"),
    "Open MPI": ("OMPI_COMM_WORLD_",),
    "Hugging Face": ("HF_", "HUGGINGFACE_", "HUGGING_FACE_", "TRANSFORMERS_", "DATASETS_", "DEEPSPEED_"),
    "search": ("RAY_", "TUNE_", "OPTUNA_"),
    "trackers": (
        "WANDB_",
        "MLFLOW_",
        "COMET_",
        "CLEARML_",
        "NEPTUNE_",
        "SWANLAB_",
        "TRACKIO_",
        "DVCLIVE_",
        "TENSORBOARD_",
    ),
    "Keras": ("KERAS_", "TF_CPP_", "TF_ENABLE_", "TF_USE_"),
    "Python": ("PYTHON",),
}
NAMES = frozenset(
    {
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "MASTER_ADDR"),
        *("MASTER_PORT", "LOGLEVEL", "USE_LIBUV", "USE_TORCH", "USE_TF", "USE_JAX", "USE_TORCH_XLA"),
        *("DISABLE_MLFLOW_INTEGRATION", "BITSANDBYTES_NOWELCOME", "TQDM_DISABLE", "TQDM_MININTERVAL"),
        *("LD_PRELOAD", "LD_LIBRARY_PATH", "MALLOC_ARENA_MAX", "VIRTUAL_ENV", "CONDA_PREFIX", "TMPDIR"),
        *("LANG", "LC_ALL", "LC_CTYPE", "NO_COLOR", "TERM", "COLUMNS", "DO_NOT_TRACK"),
        *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"),
        *("REQUESTS_CA_BUNDLE", "SSL_CERT_FILE", "CURL_CA_BUNDLE", "XDG_CACHE_HOME"),
    }
)
# A name with one of these words holds a secret, also where `holds_a_secret` is not sure.
SECRET_WORDS = re.compile(
    r"TOKEN(?!IZ)|SECRET|PASSW|PASSPHRASE|CREDENTIAL|API_?KEY|(^|_)(KEYS?|PASS|PWD?|PSW|AUTH|BEARER|JWT|COOKIE|SAS)(_|$)"
)
SWITCHES = frozenset({"", "0", "1", "true", "false", "yes", "no", "on", "off"})
# What is hidden within values -> what is shown of it. Rather too much than too little.
HIDDEN_PARTS: tuple[tuple[re.Pattern[str], str], ...] = (
    # Who signs in, with letters that an address may not have, and without `http://`, as proxies may be written.
    (re.compile(r"://[^\s@]*:\S*@"), "://"),
    (re.compile(r"(?<![^\s,;='\"])[^\s:/@]+:[^\s@]+@"), ""),
    # Services take keys there.
    (re.compile(r"(://[^\s?#]*)[?#]\S+"), rf"\1?{HIDDEN}"),
    (
        re.compile(
            r"([\w-]*(?:token(?!iz)|secret|passw|passphrase|credential|api[_-]?key|access[_-]?key)[\w-]*[\"']?\s*[=:]\s*)\S+",
            re.IGNORECASE,
        ),
        rf"\1{HIDDEN}",
    ),
    (re.compile(r"\b(Bearer|Basic)\s+\S+", re.IGNORECASE), rf"\1 {HIDDEN}"),
    # Tokens that can be told by how they begin: of Hugging Face, GitHub, GitLab, OpenAI and others, Slack, and JWTs.
    (re.compile(r"\b(?:hf_|gh[a-z]_|github_pat_|glpat-|sk-|xox[a-z]-|eyJ)[\w.-]{16,}"), HIDDEN),
)
SHORTEST_SECRET = 6


def variables(environment: Mapping[str, str] = os.environ, home: str | None = None) -> dict[str, str]:
    """Those that are set, in alphabetical order: name -> value, with the home folder as `~`.

    Parameters:
        environment: all variables.
        home: the home folder; that of the user by default.
    """
    beginnings = tuple(prefix for prefixes in PREFIXES.values() for prefix in prefixes)
    secrets = {
        value for name, value in environment.items() if _is_secret(name, value) and len(value) >= SHORTEST_SECRET
    }
    shown = {}
    for name in sorted(environment):
        if name in NAMES or name.startswith(beginnings):
            value = environment[name]
            shown[name] = HIDDEN if _is_secret(name, value) else _harmless(value, secrets, home)
    return shown


def with_tilde(text: str, home: str | None = None) -> str:
    """The text with `~` for the home folder, whose name often is a person's."""
    home = os.path.expanduser("~") if home is None else home
    home = home.rstrip(os.sep)
    return re.sub(rf"{re.escape(home)}(?![\w.-])", "~", text) if home else text


def _is_secret(name: str, value: str) -> bool:
    if value.lower() in SWITCHES:
        return False
    return holds_a_secret(name) or SECRET_WORDS.search(name.upper()) is not None


def _harmless(value: str, secrets: set[str], home: str | None) -> str:
    for secret in sorted(secrets, key=len, reverse=True):
        value = value.replace(secret, HIDDEN)
    value = str(without_secrets(value))
    for pattern, shown in HIDDEN_PARTS:
        value = pattern.sub(shown, value)
    return with_tilde(value, home)
