"""Read and write the files of a folder at once."""

from model import write_atomically


def read_tree(folder):
    """Return {name inside the folder, with slashes: bytes} of all its files. Raises OSError."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def write_tree(folder, files):
    """Write {name inside the folder, with slashes: bytes} atomically. Raises OSError."""
    paths = {folder / name: [content] for name, content in files.items()}
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(paths)
