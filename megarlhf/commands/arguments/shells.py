"""The shells that `megarlhf completion` writes for, and what its help says."""

SHELLS = ("bash", "zsh", "fish")
HELP_OF_COMPLETION = """For the shell that is open, and for all later ones:

  bash   source <(megarlhf completion bash)
         megarlhf completion bash > ~/.local/share/bash-completion/completions/megarlhf
  zsh    source <(megarlhf completion zsh)
         megarlhf completion zsh > "${fpath[1]}/_megarlhf"
  fish   megarlhf completion fish | source
         megarlhf completion fish > ~/.config/fish/completions/megarlhf.fish

Make it again after an update of megarlhf."""
