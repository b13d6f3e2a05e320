"""What people pass as a checkpoint although it is none: what each file or folder is, and what to do with it."""

import re
import zipfile

ADAPTER = (
    "a LoRA adapter, which is not a model by itself: merge it into its base model (merge_and_unload in PEFT), save "
    "that with save_pretrained, and pass the new folder"
)
DATA = "training data, not a model: pass --data_dir {} to train.py"
POINTER = "a Git LFS pointer and not the file itself: run git lfs pull"
GGUF = "a GGUF file, for llama.cpp: pass the Hugging Face folder that it was made from"
# how a file begins
BEGINNINGS = {
    b"GGUF": GGUF,
    b"version https://git-lfs": POINTER,
    b"<": "a web page and not the file itself: download it again",
    b"\x1f\x8b": "a compressed file: unpack it first",
    b"\x89HDF": "a file of Keras or TensorFlow, and only PyTorch's can be read",
}
TORCH_SAVE = re.compile(r"(^|/)data\.pkl$")  # an entry in the zip archive that torch.save writes


def refuse_foreign(path):
    """Raise ValueError, with one line, if we recognize what is at `path` and cannot read it as a checkpoint.

    path  a file, a folder, or the ckpt.pt or last.pt that a folder lacks
    """
    if path.name in ("ckpt.pt", "last.pt") and not path.exists():
        path = path.parent
    what = describe_file(path) if path.is_file() else describe_folder(path) if path.is_dir() else None
    if str(path).startswith(("http:", "https:")):
        what = "a web address: download the file or folder first"
    if what:
        raise ValueError(f"{path} is {what}")


def refuse_pointer(file):
    """Raise ValueError if a file is what git leaves without git-lfs."""
    with open(file, "rb") as opened:
        if opened.read(23) == b"version https://git-lfs":
            raise ValueError(f"{file} is {POINTER}")


def describe_folder(folder):
    """Return what a folder is, and what to do with it. None: a Hugging Face folder, or nothing that we know."""
    models = sorted(file.parent for file in folder.glob("*/*/config.json") if file.parent.parent.name == "snapshots")
    models += sorted(file.parent for file in folder.glob("checkpoint-*/config.json"))
    weights = [*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")]
    adapter = [*folder.glob("adapter_config.json"), *folder.glob("checkpoint-*/adapter_config.json")]  # of a Trainer
    if adapter and all(file.name.startswith("adapter") for file in weights):
        return ADAPTER
    if (folder / "config.json").exists():
        return None
    if models:  # a download cache, or what a Trainer of transformers saved
        return f"a folder of models: pass one of them, such as {models[-1]}"
    if weights:
        return "a Hugging Face folder without its config.json: download all of its files"
    if (folder / "ckpt.pt").exists():
        return f"a folder without a last.pt to resume: --init_from {folder} starts a new run from its weights"
    if files := sorted(folder.glob("*.pt")):
        return f"a folder without a ckpt.pt: pass the file, such as {files[0]}"
    if (folder / "train.bin").exists():
        return DATA.format(folder)
    if file := next(folder.glob("*.gguf"), None):
        return f"a folder with {file.name}, {GGUF}"
    return None


def describe_file(file):
    """Return what a file is, and what to do with it. None: it may be a checkpoint."""
    with open(file, "rb") as opened:
        head = opened.read(2**20)
    if not head:
        return "empty: copy or download it again"
    for begin, what in BEGINNINGS.items():
        if head.startswith(begin):
            return what
    if file.suffix == ".onnx":
        return "an ONNX file, which only sample.py --engine onnx runs"
    if file.name in ("train.bin", "val.bin", "meta.json"):
        return DATA.format(file.parent)
    # the header of a .safetensors file is JSON, after its length in 8 bytes
    if head[8:9] != b"{" and head.lstrip()[:1] != b"{" and file.suffix not in (".bin", ".txt"):
        try:
            names = zipfile.ZipFile(file).namelist() if zipfile.is_zipfile(file) else []
        except (zipfile.BadZipFile, NotImplementedError, ValueError):  # damaged, as load_checkpoint will say
            return None
        return "a zip archive: unpack it first" if names and not any(map(TORCH_SAVE.search, names)) else None
    if file.name.startswith("adapter_") or b"lora_A." in head or (file.parent / "adapter_config.json").exists():
        return ADAPTER
    if (file.parent / "config.json").exists():
        return f"one file of a Hugging Face folder: pass the folder, {file.parent}"
    if file.suffix == ".txt" and file.name not in ("merges.txt", "vocab.txt"):
        return f"text, not a model: python data/prepare.py --input {file} prepares it for train.py"
    return "one file of a Hugging Face folder: pass the folder, with its config.json and tokenizer.json"
