"""Entry point of `kubectl_complete-finetune`, by which kubectl completes the words after `kubectl finetune`.

kubectl runs it with these words, the last of which is incomplete, and reads one completion per line and a directive.
Source: https://kubernetes.io/docs/tasks/extend-kubectl/kubectl-plugins/ and spf13/cobra, `__complete`.
"""

import os
import shlex
import sys

NO_FILES = ":4"  # directive: do not complete names of files


def main() -> None:
    """Print the completions of the command line."""
    words = sys.argv[1:] or [""]
    os.environ["_FINETUNE_COMPLETE"] = "complete_bash"
    os.environ["COMP_WORDS"] = shlex.join(["finetune", *words[:-1]]) + " " + words[-1]
    os.environ["COMP_CWORD"] = str(len(words))
    from finetune_cli.app import app

    try:
        app(prog_name="finetune")
    except SystemExit:  # the completion of typer ends the program
        print()
    print(NO_FILES)


if __name__ == "__main__":
    main()
