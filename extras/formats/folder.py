"""Read and write the files of a folder."""

from model import write_atomically


def read_tree(folder):
    """Return {name inside the folder, with slashes: bytes} of all its files. Raises OSError."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def write_tree(folder, files):
    """Write {name inside the folder, with slashes: bytes}, each file atomically. Raises OSError."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, [content])
