{{- define "labels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "pod" -}}
automountServiceAccountToken: false
securityContext:
  runAsNonRoot: true
  runAsUser: 1000
  runAsGroup: 1000
  fsGroup: 1000
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "container" -}}
image: {{ .Values.image | quote }}
imagePullPolicy: {{ .Values.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{- /* Resources, with so many GPUs: a list of the map and the number. */ -}}
{{- define "resources" -}}
{{- $resources := deepCopy (index . 0) -}}
{{- $gpus := index . 1 -}}
{{- if $gpus -}}
{{- $_ := set $resources "limits" (merge (dict "nvidia.com/gpu" $gpus) ($resources.limits | default dict)) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end }}

{{- define "claim" -}}
accessModes: [ReadWriteOnce]
{{- with .class }}
storageClassName: {{ . }}
{{- end }}
resources: {requests: {storage: {{ .size }}}}
{{- end }}
