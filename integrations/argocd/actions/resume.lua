-- Continues from the last checkpoint.
obj.spec.suspend = false
return obj
