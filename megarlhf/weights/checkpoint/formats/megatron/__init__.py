"""What both formats of Megatron have: arguments, tracker."""
