{{- define "finetune.image" -}}
{{- $tagged := printf "%s:%s" .Values.image.repository (.Values.image.tag | default (printf "v%s" .Chart.AppVersion)) -}}
{{- $image := .Values.image.digest | empty | ternary $tagged (printf "%s@%s" .Values.image.repository .Values.image.digest) -}}
{{- include "finetune.replaceRegistry" (dict "image" $image "registry" .Values.global.imageRegistry) -}}
{{- end -}}

{{- define "finetune.trainerImage" -}}
{{- $image := .Values.trainerImage | default (printf "ghcr.io/finetune-operator/trainer:v%s" .Chart.AppVersion) -}}
{{- include "finetune.replaceRegistry" (dict "image" $image "registry" .Values.global.imageRegistry) -}}
{{- end -}}

{{- /* The first part of an image is its registry if it looks like a host, as in containerd: it contains . or :. */ -}}
{{- define "finetune.replaceRegistry" -}}
{{- $parts := splitList "/" .image -}}
{{- $hasRegistry := and (gt (len $parts) 1) (regexMatch "[.:]|^localhost$" (first $parts)) -}}
{{- if .registry -}}
{{- printf "%s/%s" .registry (join "/" (ternary (rest $parts) $parts $hasRegistry)) -}}
{{- else -}}
{{- .image -}}
{{- end -}}
{{- end -}}

{{- /* Names are those of the release, so that two releases with different watchNamespaces live side by side. */ -}}
{{- define "finetune.name" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 52 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "finetune.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "finetune.labels" -}}
{{ include "finetune.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}
