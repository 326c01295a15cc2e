-- Saves a checkpoint and releases all pods.
obj.spec.suspend = true
return obj
