"""A worker process of another interpreter, from both ends.

It cannot be forked from the fork server. What it does comes over its standard input, which the
server keeps open: when that closes, the process ends.
"""

import contextlib
import multiprocessing.process
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[3]
_LENGTH_BYTES = 8


class OtherProcess:
    """A started process; as far as the grid uses it, like one of multiprocessing.

    It calls the first of `work`, a function of a module, with the others. The last of them are the
    arguments of a program, whose first one is a connection. `output` is a pipe for stdout and
    stderr, or None.
    """

    def __init__(
        self,
        python: str,
        environment: Mapping[str, str],
        work: tuple[Any, ...],
        output: Connection | None,
    ) -> None:
        *others, (control, *arguments) = work
        printing = None if output is None else output.fileno()
        # A path of another Python cannot be unpickled.
        sent = [
            (isinstance(one, Path), str(one) if isinstance(one, Path) else one) for one in arguments
        ]
        content = pickle.dumps((_users_paths(), str(_ROOT), control.fileno(), others, sent))
        self._process = subprocess.Popen(
            [python, "-P", "-m", __name__],
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=printing,
            stderr=printing,
            pass_fds=[control.fileno()],
            process_group=0,
        )
        self.pid = self._process.pid
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended
            self._process.stdin.write(len(content).to_bytes(_LENGTH_BYTES, "little") + content)
            self._process.stdin.flush()

    @property
    def exitcode(self) -> int | None:
        """Exit code, negative for a signal; None while the process runs."""
        return self._process.poll()

    def join(self) -> None:
        """Release its pipe, after its end."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()


def _users_paths() -> list[str]:
    """Return the folders of the user's modules, which are not those of this environment."""
    own = tuple(os.path.join(prefix, "") for prefix in (sys.prefix, sys.base_prefix))
    paths = [os.path.abspath(path) for path in sys.path]
    foreign = {"site-packages", "dist-packages"}
    return [p for p in paths if not p.startswith(own) and not foreign & set(Path(p).parts)]


def main() -> None:
    """Do what the server says."""
    server = os.dup(0)
    with open(0, "rb", closefd=False) as pipe:
        content = pipe.read(int.from_bytes(pipe.read(_LENGTH_BYTES), "little"))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    process: Any = multiprocessing.process
    process._parent_process = process._ParentProcess("server", os.getppid(), server)
    paths, root, control, others, sent = pickle.loads(content)
    os.set_inheritable(control, False)
    sys.path += [path for path in paths if path not in sys.path]
    # The package may be installed at another place here.
    places = {root: _ROOT}
    arguments = [places.get(one, Path(one)) if is_path else one for is_path, one in sent]
    function, *its = others
    function(*its, (Connection(control), *arguments), None)


if __name__ == "__main__":
    main()
