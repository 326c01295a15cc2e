-- Actions of a FineTuneJob: an unfinished job can be cancelled, and suspended or resumed.
local finished = false
for _, condition in ipairs((obj.status or {}).conditions or {}) do
  if condition.type == "Finished" and condition.status == "True" then
    finished = true
  end
end
local suspended = obj.spec.suspend == true
return {
  suspend = {disabled = finished or suspended},
  cancel = {disabled = finished or obj.spec.cancel == true},
  resume = {disabled = finished or not suspended},
}
